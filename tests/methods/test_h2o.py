from typing import Any

import families
import matrix
import pytest
import torch
from masked_reference import largest_difference
from torch import Tensor

import foveakv
from foveakv.engines.transformers import compat
from foveakv.errors import BudgetError, MethodError
from foveakv.methods.h2o import H2O
from foveakv.methods.hae import HAE

FAMILY = "llava"


@pytest.fixture(scope="module")
def inputs() -> dict[str, Tensor]:
    return families.prompt(FAMILY, dtype=torch.float64)


@pytest.fixture(scope="module")
def batch() -> families.Batch:
    return families.batch(FAMILY, dtype=torch.float64)


@pytest.fixture
def model() -> Any:
    return matrix.model(FAMILY, torch.float64)


@pytest.mark.parametrize("per_head", [True, False])
@pytest.mark.parametrize("budget", [20, 41])
def test_hae_without_dap_and_a_bin_of_one_is_h2o(model, inputs, budget, per_head):
    greedy = H2O(budget=budget, per_head_scores=per_head)
    same = HAE(
        budget=budget, dap=False, value_norm=False, recycle_bin_size=1, recent=budget - budget // 2,
        per_head_scores=per_head,
    )  # fmt: skip
    a = matrix.compressed(model, greedy, inputs, max_new_tokens=14)
    b = matrix.compressed(model, same, inputs, max_new_tokens=14)
    assert torch.equal(a.tokens, b.tokens)
    assert largest_difference(a.logits, b.logits) < 1e-12
    for step_a, step_b in zip(a.trace, b.trace, strict=True):
        assert step_a.keys() == step_b.keys()
        assert all(torch.equal(step_a[layer], step_b[layer]) for layer in step_a)
    assert a.session.report.evicted == b.session.report.evicted > 0


def reference(model: Any, inputs: dict[str, Tensor], budget: int, steps: int) -> list[list[set[int]]]:
    """The rule written out with sets, over the first layer of a plain run: what each head holds after each step.

    Only the first layer: its keys and queries do not depend on what was evicted, given the same tokens.
    """
    model.set_attn_implementation("eager")
    try:
        output = model.generate(**inputs, **{**matrix.GREEDY, "max_new_tokens": steps + 1}, output_attentions=True)
    finally:
        model.set_attn_implementation("sdpa")
    held = []
    heavy = budget // 2
    for head in range(2):
        logits = [step[0][0, 2 * head : 2 * head + 2] for step in output.attentions]  # [G, q, T] probabilities
        score = {j: float(logits[0][..., j].sum()) for j in range(logits[0].shape[-1])}
        recent = budget - heavy
        alive = set(sorted(score, key=lambda j: -score[j] if j < len(score) - recent else -1e9)[:budget])
        rows = [set(alive)]
        for attention in logits[1:]:
            new = attention.shape[-1] - 1
            alive.add(new)
            score[new] = 0.0
            kept = sorted(alive)
            shares = attention[:, 0, kept]
            shares = shares / shares.sum(-1, keepdim=True)  # softmax over what is held
            for j, share in zip(kept, shares.sum(0).tolist(), strict=True):
                score[j] += share
            alive.remove(min((j for j in alive if j <= new - recent), key=lambda j: score[j]))
            rows.append(set(alive))
        held.append(rows)
    return held


def test_first_layer_follows_the_rule(model, inputs):
    """Teacher-forced: the compressed run is given the plain run's tokens, so that the first layer sees the same."""
    budget, steps = 21, 9
    plain = matrix.plain(model, inputs, max_new_tokens=steps + 1)
    expected = reference(model, inputs, budget, steps)
    columns = inputs["input_ids"].shape[1]
    with foveakv.compress(model, H2O(budget=budget)) as session, torch.no_grad():
        model(**inputs, use_cache=True)
        for step in range(steps + 1):
            for head in range(2):
                assert set(session.kept(0)[0, head].tolist()) == expected[head][step]
            if step < steps:
                token = plain.tokens[:, columns + step : columns + step + 1]
                model(input_ids=token, **{compat.cache_argument(model): session.cache})


def test_heavy_and_recent_halves(model, inputs):
    run = matrix.compressed(model, H2O(budget=20, heavy_ratio=0.25), inputs)
    for positions in matrix.positions_held(run):
        assert positions.shape[-1] == 20
        for head in range(2):
            assert positions[0, head, -15:].tolist() == list(range(run.cache.seen - 15, run.cache.seen))
    heads = torch.stack(matrix.positions_held(run))
    assert not torch.equal(heads[:, :, 0], heads[:, :, 1])  # heads rank for themselves
    shared = torch.stack(matrix.positions_held(matrix.compressed(model, H2O(budget=20, per_head_scores=False), inputs)))
    assert torch.equal(shared[:, :, 0], shared[:, :, 1])


@pytest.mark.parametrize("heavy_ratio", [0.0, 0.5, 1.0])
def test_one_eviction_per_step_once_the_budget_is_reached(model, inputs, heavy_ratio):
    prompt = inputs["input_ids"].shape[1]
    run = matrix.compressed(model, H2O(budget=prompt + 3, heavy_ratio=heavy_ratio), inputs, max_new_tokens=9)
    sizes = [int((step[0][0, 0] >= 0).sum()) for step in run.trace[1:]]
    assert sizes == [min(prompt + 1 + i, prompt + 4) for i in range(8)]
    assert run.session.report.layers[0].flushes == 5
    assert run.session.report.evicted == 5 * 4 * 2
    matrix.check_against_reference(model, run, inputs, 1e-9, max_new_tokens=9)


def test_rows_of_a_batch_are_what_they_are_alone(model, batch):
    run = matrix.compressed(model, H2O(budget=0.4), batch.inputs)
    assert len(set(run.cache.state.steady.tolist())) > 1
    for b, single in enumerate(batch.singles):
        alone = matrix.compressed(model, H2O(budget=0.4), single)
        assert alone.tokens[0, -6:].tolist() == run.tokens[b, -6:].tolist()
        for layer in range(4):
            for head in range(2):
                held = run.session.kept(layer)[b, head]
                assert (held[held >= 0] - batch.pads[b]).tolist() == alone.session.kept(layer)[0, head].tolist()
    matrix.check_against_reference(model, run, batch.inputs, 1e-9)


def test_beams(model, batch):
    run = matrix.compressed(model, H2O(budget=0.4), batch.inputs, num_beams=3)
    matrix.check_against_reference(model, run, batch.inputs, 1e-9, num_beams=3)


def test_wrong_options():
    with pytest.raises(MethodError, match="between 0 and 1"):
        H2O(heavy_ratio=1.5)
    with pytest.raises(MethodError, match=r"heavy_ratio must be a number .*; got 'x'"):
        H2O(heavy_ratio="x")
    for rows in (0, 2.5):
        with pytest.raises(MethodError, match=f"prefill_rows .*; got {rows}"):
            H2O(prefill_rows=rows)
    with pytest.raises(BudgetError):
        H2O(budget=-1)

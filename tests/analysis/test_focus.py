"""What heads attend to while decoding, attention curves, rank correlations and sweeps, against plain references."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import families
import pytest
import torch
from torch import Tensor

from foveakv.analysis import passes
from foveakv.analysis.focus import SHARES, Focus, FocusProbe, focus
from foveakv.analysis.head_sweep import sweep
from foveakv.analysis.heads import PromptHeads, head_maps
from foveakv.analysis.rank_correlation import rank_correlation, ranks
from foveakv.analysis.sparsity import sparsity
from foveakv.errors import InputError, MethodError
from foveakv.methods.hae import HAE
from foveakv.methods.hybridkv import HybridKV

HEADS, GROUP, STEPS = 2, 2, 6
RULES = HybridKV(theta=0.998, window=4, budget=0.5, k_ratio=0.1)


@pytest.fixture(scope="module")
def found(model: Any, inputs: dict[str, Tensor]) -> Focus:
    prompts = {"one": inputs, "two": inputs}
    maps = head_maps(model, prompts, RULES)
    return focus(model, prompts, maps, RULES, new_tokens=STEPS, to_the_end=True)


@pytest.fixture(scope="module")
def plain(model: Any, inputs: dict[str, Tensor]) -> Any:
    """The attentions of the plain model's greedy answer."""
    model.set_attn_implementation("eager")
    output = model.generate(
        **inputs, max_new_tokens=STEPS, min_new_tokens=STEPS, do_sample=False, output_attentions=True,
        return_dict_in_generate=True,
    )  # fmt: skip
    model.set_attn_implementation("sdpa")
    return output.attentions


def test_focus_counts_are_those_of_plain_attention(found: Focus, plain: Any, inputs: dict[str, Tensor]) -> None:
    columns = inputs["input_ids"].shape[1]
    k = math.ceil(0.1 * columns)
    seen: dict[tuple[int, int], set[int]] = {}
    for step, layers in enumerate(plain[1:]):
        for number, layer in enumerate(layers):
            received = layer[0, :, 0, :columns].view(HEADS, GROUP, columns).sum(1)
            for h in range(HEADS):
                seen.setdefault((number, h), set()).update(received[h].topk(k).indices.tolist())
                assert int(found.counts[0][step, number, h]) == len(seen[number, h])
    assert found.k == (k, k)
    assert found.steps == [STEPS - 1, STEPS - 1]
    assert found.final[1, 2, 1] == len(seen[2, 1]) / k
    assert max(map(len, seen.values())) > k  # some head moves on


def test_coverage_is_that_of_plain_attention(found: Focus, plain: Any, model: Any, inputs: dict[str, Tensor]) -> None:
    visual = inputs["input_ids"][0] == model.config.image_token_id
    columns = len(visual)
    rows = [c for c in range(columns) if not visual[c] and c > int(visual.nonzero()[0])]
    for number, layer in enumerate(plain[0]):
        best = layer[0][:, rows].sum(1).view(HEADS, GROUP, columns).sum(1).topk(found.k[0]).indices
        steps = [each[number][0, :, 0, :columns].view(HEADS, GROUP, columns).sum(1) for each in plain[1:]]
        total = torch.stack(steps).sum(0)
        expected = total.gather(1, best).sum(1) / total.sum(1)
        assert torch.allclose(found.covered[0][number], expected.double(), atol=1e-6)


def test_curves_are_those_of_plain_attention(found: Focus, plain: Any, model: Any, inputs: dict[str, Tensor]) -> None:
    visual = inputs["input_ids"][0] == model.config.image_token_id
    columns = len(visual)
    rows = [c for c in range(columns) if not visual[c] and c > int(visual.nonzero()[0])]
    for number, layer in enumerate(plain[0]):
        ordered = layer[0][:, rows].sort(-1, descending=True).values.cumsum(-1).mean(1).view(HEADS, GROUP, -1).mean(1)
        expected = torch.stack([ordered[:, math.ceil(round(share * columns, 9)) - 1] for share in SHARES], -1)
        assert torch.allclose(found.curves[0, number], expected.double(), atol=1e-6)
    # at the share of k, a curve is S
    assert torch.allclose(found.curves[..., SHARES.index(0.1)], found.maps.scores, atol=1e-6)
    assert found.curves[..., -1].allclose(torch.ones(()).double())


def test_watching_changes_no_answer(model: Any, inputs: dict[str, Tensor]) -> None:
    _, tokens = passes.run(model, inputs, FocusProbe(RULES), STEPS, to_the_end=True)
    ids = model.generate(**inputs, max_new_tokens=STEPS, min_new_tokens=STEPS, do_sample=False)
    assert tokens == ids[0, inputs["input_ids"].shape[1] :].tolist()


def test_what_is_written(found: Focus, model: Any, inputs: dict[str, Tensor]) -> None:
    data = found.to_dict()
    assert data["focus"]["steps"] == [STEPS - 1] * 2
    assert data["focus"]["correlation"]["n"] == 8
    assert len(data["prompts"]) == 2
    static = found.maps.static
    assert data["focus"]["class_curves"]["static"][2] == pytest.approx(float(found.curves[..., 2][static].mean()))
    assert found.class_mean(found.final, False, 1) == pytest.approx(float(found.final[1][~static[1]].mean()))
    row = found.rows()[3]
    assert row["focus_count_per_k"] == float(found.final[0, 1, 1])
    assert row["attention_top_0.05"] == float(found.curves[0, 1, 1, 2])
    even = dataclasses.replace(found, maps=dataclasses.replace(found.maps, scores=torch.ones_like(found.maps.scores)))
    assert even.to_dict()["focus"]["correlation"] == {"mean": None, "low": None, "high": None, "n": 8}
    short = focus(model, {"one": inputs}, head_maps(model, {"one": inputs}, RULES), RULES)
    assert short.counts == ()
    assert "counts" not in short.to_dict()["focus"]
    assert "focus_count" not in short.rows()[0]


def test_an_answer_of_one_token_has_no_steps(model: Any, inputs: dict[str, Tensor]) -> None:
    maps = head_maps(model, {"one": inputs}, RULES)
    ids = model.generate(**inputs, max_new_tokens=1, do_sample=False)
    end, model.generation_config.eos_token_id = model.generation_config.eos_token_id, int(ids[0, -1])
    try:
        with pytest.raises(InputError, match="one: the answer has one token"):
            focus(model, {"one": inputs}, maps, RULES, new_tokens=3)
    finally:
        model.generation_config.eos_token_id = end


@pytest.mark.parametrize("family", families.PLAIN)
def test_every_family_can_be_measured(family: str) -> None:
    model = families.build(family)
    prompts = {"one": families.prompt(family, images=0 if family in families.TEXT else 2)}
    found = focus(model, prompts, head_maps(model, prompts, RULES), RULES, new_tokens=3, to_the_end=True)
    assert torch.allclose(found.curves[..., SHARES.index(0.1)], found.maps.scores, atol=1e-5)
    assert found.steps == [2]
    assert all(bool(((share >= 0) & (share <= 1 + 1e-6)).all()) for share in found.covered)
    if family in families.VISUAL:
        measured = sparsity(model, prompts, HAE(target_visual_tokens=0.5))
        assert len(measured.deciding["mean"].best) == found.maps.scores.shape[1]


# ---- rank correlation


def test_ranks_have_the_mean_of_ties() -> None:
    assert ranks(torch.tensor([[3.0, 1, 3, 2], [5.0, 5, 5, 5]]).double()).tolist() == [[2.5, 0, 2.5, 1], [1.5] * 4]


def test_rank_correlation() -> None:
    a = torch.tensor([0.1, 0.5, 0.3, 0.9])
    assert rank_correlation(a, a.exp()).mean == pytest.approx(1)
    assert rank_correlation(a, -a).mean == pytest.approx(-1)
    # ranks 0 2 1 3 and 1 2 0 3: 1 - 6 * (1 + 0 + 1 + 0) / (4 * 15)
    assert rank_correlation(a, torch.tensor([2.0, 3, 1, 4])).mean == pytest.approx(0.8)
    assert math.isnan(rank_correlation(a, torch.ones(4)).mean)
    generator = torch.Generator().manual_seed(0)
    x, noise = torch.randn(2, 60, generator=generator)
    found = rank_correlation(x, x + noise)
    assert found.n == 60
    assert found.low < found.mean < found.high
    assert 0.5 < found.mean < 0.9
    assert found == rank_correlation(x, x + noise)


# ---- sweep


def maps_of(scores: list[list[float]], static: list[list[bool]]) -> PromptHeads:
    made = torch.tensor([scores], dtype=torch.float64)
    types = torch.tensor([static])
    return PromptHeads(("a",), (0, 1), made, types, types.long(), (1000,), (4,), {})


def test_a_sweep_by_hand() -> None:
    maps = maps_of([[0.95, 0.5], [0.7, 0.99]], [[True, False], [False, True]])
    rules = HybridKV(budget=0.1, rounding="down", chunk_size=8)
    first, second, own = sweep(maps, rules, thetas=(0.6, 1.0), rhos=(0.5,))
    # 4 x 100 slots. theta 0.6: one dynamic head has 75, rounded down to 64; Eq. 4 gives the static heads 325
    assert (first.theta, first.rho, first.static_share) == (0.6, 0.75, 0.75)
    assert (first.dynamic_slots, first.static_slots) == (64 / 400, 325 / 400)
    assert (first.dynamic_each, first.static_each) == (pytest.approx(0.064), pytest.approx(325 / 3000))
    # theta 1: no static head, so the dynamic ones have everything: 100, rounded down to 64
    assert (second.static_share, second.static_slots, second.static_each, second.dynamic_slots) == (0, 0, None, 0.64)
    # rho 0.5, the types as they are: 100 slots for two dynamic heads, 32 each
    assert (own.theta, own.static_share, own.dynamic_slots, own.static_slots) == (None, 0.5, 64 / 400, 300 / 400)
    with pytest.raises(MethodError, match="share of the prompt or in tokens"):
        sweep(maps, HybridKV(budget="1MB"))

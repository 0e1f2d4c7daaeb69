"""HAE in a model: what DAP drops of the prompt, and what DDES drops while decoding."""

from dataclasses import dataclass, field
from typing import Any

import families
import matrix
import pytest
import torch
from torch import Tensor

import foveakv
from foveakv.engines.transformers import compat
from foveakv.errors import BudgetError, MethodError, NoVisualTokensError, UnsupportedModeError
from foveakv.methods.hae import HAE
from foveakv.methods.prompt_scores import prompt_scores

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


@dataclass
class Watched(HAE):
    """Keeps what the layers' prefill saw, and scores of some and of all rows."""

    views: list[Any] = field(default_factory=list, init=False)

    def prefill(self, view: Any) -> Any:
        scores = prompt_scores(view, 12), prompt_scores(view, 10_000)
        self.views.append((view.query.clone(), view.keys.clone(), view.prompt, view.scaling, *scores))
        return super().prefill(view)


# ----------------------------------------------------------------------------------------------------------------- DAP


def naive_attention(query: Tensor, keys: Tensor, scaling: float) -> Tensor:
    """[B, H, G, C, C] of an unpadded prompt."""
    batch, heads, columns, dim = keys.shape
    grouped = query.view(batch, heads, -1, columns, dim)
    logits = torch.einsum("bhgid,bhjd->bhgij", grouped, keys) * scaling
    return logits.masked_fill(torch.ones(columns, columns).triu(1).bool(), -torch.inf).softmax(-1)


def test_first_layer_decides_by_equations_1_to_3(model, inputs):
    method = Watched(score_layer=0, rows="sum", value_norm=False, r=0.9, alpha=0.08, ddes=False, statistics=True)
    run = matrix.compressed(model, method, inputs, max_new_tokens=2)
    query, keys, prompt, scaling, *_ = method.views[0]
    attention = naive_attention(query, keys, scaling)
    mean = attention.mean((1, 2))[0]  # [C, C]
    text, visual = prompt.text[0].nonzero()[:, 0], prompt.visual[0].nonzero()[:, 0]
    a = {int(j): sum(float(mean[i, j]) for i in text) for j in visual}
    m = {int(j): max(float(mean[i, j]) for i in text) for j in visual}
    total = sum(a.values())
    drop = {j for j in a if a[j] < 0.9 / len(a) * total and m[j] < 0.08}
    assert 0 < len(drop) < len(a)
    assert run.cache.results.figures["evicted_visual"] == [len(drop)]
    expected = [c for c in range(prompt.columns + 1) if c not in drop]
    for layer in range(4):
        for head in range(2):
            assert run.session.kept(layer)[0, head].tolist() == expected
    # sparsity: of the probabilities that the mask allows, over text rows after the first visual token
    rows = [int(i) for i in text if i > visual[0]]
    seen = torch.ones(prompt.columns, prompt.columns).tril().bool()
    for name, columns in (("visual", visual), ("text", text)):
        pairs = [(i, int(j)) for i in rows for j in columns if seen[i, j]]
        low = [float((attention[0, :, :, i, j] <= 1e-4).double().mean()) for i, j in pairs]
        assert run.cache.results.figures[f"{name}_sparsity"][0] == pytest.approx(sum(low) / len(low))
    spread = torch.stack([mean[rows, j].var(correction=0) for j in visual]).mean()
    assert run.cache.results.figures["visual_variance"][0] == pytest.approx(float(spread))


@pytest.mark.parametrize("options", [{}, {"target_visual_tokens": 7}, {"criterion": "variance"}, {"c": 3}])
def test_the_same_visual_tokens_leave_every_layer(model, inputs, options):
    method = matrix.method("hae", ddes=False, budget=None, **options)
    run = matrix.compressed(model, method, inputs)
    kept = matrix.positions_held(run)
    for positions in kept[1:]:
        assert torch.equal(positions, kept[0])
    assert torch.equal(kept[0][:, :1].expand_as(kept[0]), kept[0])
    ids = inputs["input_ids"][0]
    left = set(range(len(ids))) - set(kept[0][0, 0].tolist())
    assert left
    assert all(ids[c] == families.IMAGE for c in left)
    if "target_visual_tokens" in options:
        assert int((ids == families.IMAGE).sum()) - len(left) == 7
    if "c" in options:
        assert len(left) == 3
    matrix.check_against_reference(model, run, inputs, 1e-9)


@pytest.mark.parametrize(
    "options",
    [{}, {"ddes": False, "budget": None}, {"drop_hidden_states": True, "budget": None}, {"prefill_rows": 9}],
)
def test_rows_of_a_batch_are_what_they_are_alone(model, batch, options):
    method = matrix.method("hae", **options)
    run = matrix.compressed(model, method, batch.inputs)
    evicted = run.cache.results.figures["evicted_visual"]
    assert len(set(evicted)) > 1  # ragged
    for b, single in enumerate(batch.singles):
        alone = matrix.compressed(model, method, single)
        assert alone.tokens[0, -8:].tolist() == run.tokens[b, -8:].tolist()
        assert alone.cache.results.figures["evicted_visual"] == evicted[b : b + 1]
        for layer in range(4):
            held = run.session.kept(layer)[b, 0]
            assert (held[held >= 0] - batch.pads[b]).tolist() == alone.session.kept(layer)[0, 0].tolist()
    matrix.check_against_reference(model, run, batch.inputs, 1e-9)


def test_no_visual_tokens(model):
    text = families.encode(FAMILY, [families.Row((30,))], torch.float64)
    with pytest.raises(NoVisualTokensError, match="ddes=True"):
        matrix.compressed(model, matrix.method("hae", ddes=False, budget=None), text)
    run = matrix.compressed(model, matrix.method("hae"), text)
    assert run.cache.results.figures["evicted_visual"] == [0]
    assert run.session.report.evicted > 0
    matrix.check_against_reference(model, run, text, 1e-9)


@pytest.mark.parametrize("drop_hidden_states", [False, True])
@pytest.mark.parametrize("words", [20, 60])
def test_one_row_of_a_batch_without_an_image(model, drop_hidden_states, words):
    """With 60 words, the row without an image is the longest: the batch gets no shorter, yet the other row does."""
    rows = [families.row(FAMILY, 1), families.Row((words,), 3)]
    inputs = families.encode(FAMILY, rows, torch.float64)
    method = matrix.method("hae", ddes=False, budget=None, drop_hidden_states=drop_hidden_states)
    run = matrix.compressed(model, method, inputs)
    evicted = run.cache.results.figures["evicted_visual"]
    assert evicted[0] > 0
    assert evicted[1] == 0
    matrix.check_against_reference(model, run, inputs, 1e-9)


# ------------------------------------------------------------------------------------------------- the residual stream


@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl", "llava_onevision"])
def test_dropped_hidden_states(family):
    """Layers after the deciding one compute fewer rows, and give what a masked full computation gives."""
    model = matrix.model(family, torch.float64)
    inputs = families.prompt(family, dtype=torch.float64)
    rows: list[list[int]] = []
    layers = model.get_decoder().layers
    hooks = [
        layer.mlp.register_forward_hook(lambda module, args, output, i=i: rows.append([i, args[0].shape[1]]))
        for i, layer in enumerate(layers)
    ]
    try:
        method = matrix.method("hae", drop_hidden_states=True, budget=0.9, score_layer=1)
        run = matrix.compressed(model, method, inputs)
    finally:
        for hook in hooks:
            hook.remove()
    columns, dropped = inputs["input_ids"].shape[1], run.cache.results.figures["evicted_visual"][0]
    assert dropped > 0
    assert [count for _, count in rows[: len(layers)]] == [columns] * 2 + [columns - dropped] * (len(layers) - 2)
    assert all(count == 1 for _, count in rows[len(layers) :])
    report = run.session.report  # what a plain cache would hold does not shrink with the residual stream
    assert {layer.full_slots for layer in report.layers} == {2 * (run.cache.seen)}
    assert report.full_bytes == sum(layer.full_slots for layer in report.layers) * 2 * 16 * 8
    matrix.check_against_reference(model, run, inputs, 1e-9)


def test_dropped_hidden_states_change_later_layers_only(model, inputs):
    shallow, deep = (
        matrix.compressed(
            model,
            matrix.method("hae", ddes=False, budget=None, score_layer=0, drop_hidden_states=drop),
            inputs,
            max_new_tokens=1,
        )
        for drop in (False, True)
    )
    same = [
        torch.allclose(one.segments.gather()[0], other.segments.gather()[0], rtol=0, atol=1e-12)
        for one, other in zip(shallow.cache.compressed, deep.cache.compressed, strict=True)
    ]
    assert same == [True, True] + [False] * (len(same) - 2)  # the second layer reads what the first has computed
    assert len(same) > 2
    assert torch.equal(shallow.session.kept(1), deep.session.kept(1))
    assert shallow.cache.results.figures["evicted_visual"] == deep.cache.results.figures["evicted_visual"]
    assert (shallow.logits[0][:, -1] - deep.logits[0][:, -1]).abs().max() > 1e-3


# ---------------------------------------------------------------------------------------------------------------- DDES


def test_scores_start_from_the_prompts_attention(model, inputs):
    method = Watched(dap=False, value_norm=False)
    run = matrix.compressed(model, method, inputs, max_new_tokens=1)
    for layer, seen in zip(run.cache.compressed, method.views, strict=True):
        query, keys, _, scaling, sampled, many = seen
        expected = naive_attention(query, keys, scaling).sum((2, 3))
        torch.testing.assert_close(layer.segments.field("score"), expected)
        torch.testing.assert_close(many, expected)
        assert sampled.sum() == pytest.approx(float(expected.sum()))  # sampled rows stand for all rows
        assert torch.corrcoef(torch.stack([sampled[0, 0], expected[0, 0]]))[0, 1] > 0.6


@pytest.mark.parametrize("mode", ["rerank", "mark"])
@pytest.mark.parametrize("budget", [None, 0.5, 30, 100])
def test_size_stays_between_l_and_l_plus_d(model, inputs, mode, budget):
    size = 5
    method = matrix.method("hae", mode=mode, budget=budget, recycle_bin_size=size)
    run = matrix.compressed(model, method, inputs, max_new_tokens=18)
    told = run.cache.results.figures
    prompt = inputs["input_ids"].shape[1]
    after = prompt - run.cache.results.figures["evicted_visual"][0]
    steady = {None: after, 0.5: prompt // 2, 30: 30, 100: 100}[budget]
    assert told["steady"] == [steady]
    for step, layers in enumerate(run.trace[1:]):
        for positions in layers.values():
            attended = int((positions[0, 0] >= 0).sum())  # the new token and, at most, a bin that fills with it
            assert min(steady, after) < attended <= steady + size
            assert attended <= after + step + 1
    assert told["peak"] == max(int((p[0, 0] >= 0).sum()) for layers in run.trace[1:] for p in layers.values())
    evicted = run.session.report.evicted
    dap = run.cache.results.figures["evicted_visual"][0] * 8  # four layers of two heads
    assert evicted == dap + run.cache.results.figures.get("evicted_prompt", 0) + told["evicted_decode"]
    matrix.check_against_reference(model, run, inputs, 1e-9, max_new_tokens=18)


def test_without_compress_prompt_l_is_the_prompt(model, inputs):
    method = matrix.method("hae", budget=20, compress_prompt=False, recycle_bin_size=2)
    run = matrix.compressed(model, method, inputs)
    left = inputs["input_ids"].shape[1] - run.cache.results.figures["evicted_visual"][0]
    assert run.cache.results.figures["steady"] == [left]
    assert "evicted_prompt" not in run.cache.results.figures


def test_protected_tokens_survive(model, inputs):
    method = matrix.method("hae", budget=20, recent=6, sink=3, recycle_bin_size=4)
    run = matrix.compressed(model, method, inputs, max_new_tokens=15)
    for positions in matrix.positions_held(run):
        held = positions[0, 0].tolist()
        assert held[:3] == [0, 1, 2]
        assert held[-6:] == list(range(run.cache.seen - 6, run.cache.seen))


def test_beams_reorder_scores_and_bin(model, batch):
    method = matrix.method("hae", recycle_bin_size=3, per_head_scores=True)
    options = {"num_beams": 3, "max_new_tokens": 10}
    run = matrix.compressed(model, method, batch.inputs, **options)
    assert run.session.report.evicted > 0
    matrix.check_against_reference(model, run, batch.inputs, 1e-9, **options)


def test_a_second_turn_flushes_whole_bins(model):
    turn = families.first_turn(FAMILY, [families.row(FAMILY, 1)], torch.float64)
    method = matrix.method("hae", budget=25, recycle_bin_size=4)
    with foveakv.compress(model, method) as session:
        first = model.generate(**turn.inputs, **{**matrix.GREEDY, "max_new_tokens": 4})
        later = families.next_turn(FAMILY, model, turn, first.sequences)
        cache = session.cache
        model.generate(
            **later.inputs, **{compat.cache_argument(model): cache}, **{**matrix.GREEDY, "max_new_tokens": 3}
        )
        for layer in cache.compressed:
            lengths = layer.segments.lengths
            assert bool(((lengths >= 25) & (lengths < 29)).all())
            assert int(layer.segments.field("marked").sum()) == int((lengths - 25).sum())


@families.images_in_chunks
def test_a_prompt_in_chunks_keeps_the_same(model, inputs):
    method = matrix.method("hae")
    whole = matrix.compressed(model, method, inputs)
    chunks = matrix.compressed(model, method, inputs, prefill_chunk_size=20)
    assert torch.equal(whole.tokens, chunks.tokens)
    for a, b in zip(matrix.positions_held(whole), matrix.positions_held(chunks), strict=True):
        assert torch.equal(a, b)
    with pytest.raises(UnsupportedModeError, match="drop_hidden_states"):
        matrix.compressed(model, matrix.method("hae", drop_hidden_states=True), inputs, prefill_chunk_size=20)


def test_the_same_object_twice_gives_the_same(model, inputs, batch):
    method = matrix.method("hae", statistics=True)
    first = matrix.compressed(model, method, inputs)
    matrix.compressed(model, method, batch.inputs)
    again = matrix.compressed(model, method, inputs)
    assert torch.equal(first.tokens, again.tokens)
    assert first.cache.results == again.cache.results
    matrix.check_storage(again)


def test_nothing_of_the_prompts_scores_stays_behind(model, inputs):
    """After the prompt, the state holds a few numbers per sequence, and one mark per column."""
    run = matrix.compressed(model, matrix.method("hae"), inputs)
    assert max(matrix.storage(run.cache.state).values()) <= max(64, inputs["input_ids"].shape[1])
    matrix.check_storage(run)


def test_wrong_budgets(model, inputs):
    with pytest.raises(BudgetError):
        HAE(budget=0)
    with pytest.raises(MethodError, match="raise the budget"):
        matrix.compressed(model, HAE(budget=20, recent=15, sink=6), inputs)
    matrix.compressed(model, HAE(budget=20, recent=15, sink=5), inputs)  # exactly room for them

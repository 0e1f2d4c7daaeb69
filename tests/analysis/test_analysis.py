"""The analyses against values by hand, against plain attention, and against the methods that they speak of."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import families
import pytest
import torch
from simulated import Simulation
from torch import Tensor

from foveakv.analysis import passes
from foveakv.analysis.attention_trace import Trace, TraceProbe, record
from foveakv.analysis.eviction import eviction, replay
from foveakv.analysis.heads import PromptHeads, correlation, head_maps
from foveakv.analysis.shown import shown
from foveakv.analysis.sparsity import SparsityProbe
from foveakv.analysis.viz_shown import evenly
from foveakv.errors import InputError, MethodError, UnsupportedModeError
from foveakv.methods import Decision, Method, PrefillView
from foveakv.methods.ddes import RecycleBin
from foveakv.methods.hae import HAE
from foveakv.methods.hybridkv import HybridKV

HEADS, GROUP = 2, 2


def plain_tokens(model: Any, inputs: dict[str, Tensor], count: int) -> list[int]:
    ids = model.generate(**inputs, max_new_tokens=count, min_new_tokens=count, do_sample=False)
    return ids[0, inputs["input_ids"].shape[1] :].tolist()


@dataclass
class Half(Method):
    """Keeps every second column."""

    name: ClassVar[str] = "half"

    def prefill(self, view: PrefillView) -> Decision:
        return Decision(keep=(view.positions % 2 == 0)[:, None])


# ---- heads


def maps(scores: list[Any], static: list[Any]) -> PromptHeads:
    count = len(scores)
    made = torch.tensor(scores, dtype=torch.float64)
    types = torch.tensor(static)
    return PromptHeads(tuple("abc"[:count]), (0, 3), made, types, types.long(), (10,) * count, (4,) * count, {})


def test_correlation() -> None:
    assert correlation(torch.tensor([1.0, 2, 3]), torch.tensor([10.0, 20, 30])) == pytest.approx(1)
    assert correlation(torch.tensor([1.0, 2, 3]), torch.tensor([3.0, 2, 1])) == pytest.approx(-1)
    # deviations (-1, 0, 1) and (-1, 1, 0): 1 / 2
    assert correlation(torch.tensor([1.0, 2, 3]), torch.tensor([1.0, 3, 2])) == pytest.approx(0.5)
    assert correlation(torch.tensor([1.0, 2, 3]), torch.tensor([1.0, 1, 1])) is None


def test_heads_between_prompts() -> None:
    found = maps(
        [[[0.9, 0.1], [0.5, 0.3]], [[0.9, 0.1], [0.5, 0.3]], [[0.1, 0.9], [0.5, 0.3]]],
        [[[True, False], [False, False]], [[True, False], [True, False]], [[False, True], [True, False]]],
    )
    assert found.static_shares == [0.25, 0.5, 0.5]
    assert found.static_frequency.tolist() == [[pytest.approx(2 / 3), pytest.approx(1 / 3)], [pytest.approx(2 / 3), 0]]
    assert found.steady_share == 0.25
    assert [(p.first, p.second, p.changed) for p in found.pairs] == [
        ("a", "b", 0.25),
        ("a", "c", 0.75),
        ("b", "c", 0.5),
    ]
    assert found.pairs[0].correlation == pytest.approx(1)
    rows = found.rows()
    assert len(rows) == 12
    assert rows[3] == {
        "prompt": "a",
        "layer": 3,
        "kv_head": 1,
        "top_k_attention": 0.3,
        "static": False,
        "budget_slots": 0,
    }
    assert found.to_dict()["prompts"][2]["static_share"] == 0.5


def test_head_scores_are_those_of_plain_attention(
    model: Any, inputs: dict[str, Tensor], visual: Tensor, attention: list[Tensor]
) -> None:
    columns = len(visual)
    first = int(visual.nonzero()[0])
    rows = [c for c in range(columns) if not visual[c] and c > first]
    k = math.ceil(0.05 * columns)
    found = head_maps(model, {"one": inputs, "again": inputs}, HybridKV(theta=0.5, window=4, budget=0.5))
    expected = torch.stack(
        [layer[:, rows].topk(k).values.sum(-1).mean(-1).view(HEADS, GROUP).mean(1) for layer in attention]
    )
    assert torch.allclose(found.scores[0], expected.double(), atol=1e-5)
    assert torch.equal(found.static[0], expected >= 0.5)
    assert found.tokens[0] == columns
    assert found.visual[0] == int(visual.sum())
    assert found.pairs[0].changed == 0


def test_a_batch_is_no_prompt(model: Any) -> None:
    with pytest.raises(InputError, match="two: an analysis takes single prompts"):
        head_maps(model, {"two": families.batch("llava").inputs}, HybridKV())
    with pytest.raises(InputError, match="at least one"):
        passes.check({})


# ---- eviction


def trace(prompt: list[float], *steps: list[float]) -> Trace:
    return Trace("one", (0,), torch.tensor([prompt]), [torch.tensor([step]) for step in steps])


BY_HAND = trace([4.0, 1, 3, 2], [0.0, 0, 0, 0, 5], [0.0, 0, 0, 0, 0, 6], [0.0, 2, 0, 1, 1, 0, 6])


def test_replay_of_a_bin_by_hand() -> None:
    found = replay(BY_HAND, RecycleBin(2), steady=4)
    # tokens 1 (score 1) and 3 (score 2) leave after step 1; of step 2's attention 3 of 10 falls on them
    assert found.last_seen.tolist() == [[3, 1, 3, 1, 3, 3, 3]]
    assert found.lost_by_step.tolist() == pytest.approx([0, 0, 0.3])
    assert found.lost.tolist() == pytest.approx([3 / 21])
    assert found.score.tolist() == [3]
    assert (found.evicted, found.peak) == (2, 6)


def test_replay_of_greedy_eviction_by_hand() -> None:
    found = replay(BY_HAND, RecycleBin(1), steady=4)
    # 1 leaves after step 0, 3 after step 1, 2 (score 3) after step 2
    assert found.last_seen.tolist() == [[3, 0, 2, 1, 3, 3, 3]]
    assert found.lost.tolist() == pytest.approx([3 / 21])
    assert found.score.tolist() == [1 + 2 + 3]
    assert (found.evicted, found.peak) == (3, 5)


def test_replay_brings_the_prompt_down_first() -> None:
    found = replay(BY_HAND, RecycleBin(4), steady=2)
    assert found.last_seen.tolist() == [[3, -1, 3, -1, 3, 3, 3]]  # 2 + 3 tokens: the bin is never full
    assert found.evicted == 0
    assert found.score.tolist() == [0]


@pytest.mark.parametrize(("size", "sink", "recent"), [(1, 0, 0), (1, 2, 3), (4, 0, 0), (4, 1, 2)])
def test_replay_is_the_method_on_attention_that_does_not_depend_on_it(size: int, sink: int, recent: int) -> None:
    columns, steps, steady = 12, 20, 9
    prompt = torch.rand(3, columns)
    received = [torch.rand(3, columns + t + 1) for t in range(steps)]
    found = replay(Trace("x", (0, 1, 2), prompt, received), RecycleBin(size, sink=sink), steady, recent)
    for layer in range(3):
        rules = RecycleBin(size, sink=sink)
        every = torch.ones(1, 1, columns, dtype=torch.bool)
        sums = prompt[None, None, layer]
        keep = rules.shrink(sums, every, torch.tensor([steady]), torch.tensor([recent]))
        run = Simulation(rules, sums, steady, recent, keep)
        for t, step in enumerate(received):
            run.step(step[layer])
            stored = (found.last_seen[layer, : columns + t + 1] > t).nonzero().flatten().tolist()
            assert stored == run.kept(), (layer, t)


@pytest.mark.parametrize("size", [1, 6])
def test_replay_drops_what_the_real_method_drops(model: Any, inputs: dict[str, Tensor], size: int) -> None:
    """Up to the first eviction nothing that the method decided has changed what is attended to."""
    columns = inputs["input_ids"].shape[1]
    rules = HAE(dap=False, recycle_bin_size=size, recent=0, value_norm=False)
    cache, _ = passes.run(model, inputs, rules, size + 1, to_the_end=True)
    found = replay(record(model, "one", inputs, size + 1), RecycleBin(size), columns)
    assert found.evicted == size
    for layer in range(4):
        stored = (found.last_seen[layer] == size).nonzero().flatten().tolist()
        assert cache.kept(layer)[0, 0].tolist() == stored


def test_a_record_is_the_attention_of_the_plain_model(
    model: Any, inputs: dict[str, Tensor], attention: list[Tensor]
) -> None:
    found = record(model, "one", inputs, 4)
    assert found.layers == (0, 1, 2, 3)
    assert len(found.steps) == 3
    for i, layer in enumerate(attention):
        assert torch.allclose(found.prompt[i], layer.sum((0, 1)).float(), atol=1e-3)
    model.set_attn_implementation("eager")
    output = model.generate(
        **inputs, max_new_tokens=4, min_new_tokens=4, do_sample=False, output_attentions=True,
        return_dict_in_generate=True,
    )  # fmt: skip
    model.set_attn_implementation("sdpa")
    for step, plain in zip(found.steps, output.attentions[1:], strict=True):
        assert torch.allclose(step, torch.stack([layer[0].sum((0, 1)) for layer in plain]).float(), atol=1e-3)


@pytest.mark.parametrize("probe", [TraceProbe(), SparsityProbe(HAE(target_visual_tokens=2))])
def test_watching_changes_no_answer(model: Any, inputs: dict[str, Tensor], probe: Method) -> None:
    _, tokens = passes.run(model, inputs, probe, 6, to_the_end=True)
    assert tokens == plain_tokens(model, inputs, 6)


def test_a_record_has_a_limit(model: Any, inputs: dict[str, Tensor]) -> None:
    with pytest.raises(UnsupportedModeError, match="lower --max-new-tokens"):
        passes.run(model, inputs, TraceProbe(limit=1000), 6, to_the_end=True)


def test_bins_against_greedy_eviction(model: Any, inputs: dict[str, Tensor]) -> None:
    found = eviction(model, {"one": inputs, "two": inputs}, bins=(4, 2), budget=10, new_tokens=10)
    assert [(r.size, r.matched, r.traces) for r in found.results] == [
        (2, "steady size", 8), (2, "peak", 8), (4, "steady size", 8), (4, "peak", 8),
    ]  # fmt: skip
    assert found.steady == (10, 10)
    assert found.steps == (9, 9)
    assert all(0 <= r.at_most_greedy <= 1 and 0 < r.greedy_lost < 1 for r in found.results)
    assert (found.results[0].evicted, found.results[2].evicted, found.results[0].greedy_evicted) == (8, 8, 9)
    rows = found.rows()
    assert len(rows) == 2 * 3 * 4
    one = [row for row in rows if row["prompt"] == "one"]
    assert found.by_layer[1] == pytest.approx([row["lost"] for row in one if row["bin"] == 1])
    at_most = sum(
        row["lost"] <= greedy["lost"]
        for row, greedy in zip(
            (r for r in rows if r["bin"] == 4), (r for r in rows if r["bin"] == 1), strict=True
        )
    )  # fmt: skip
    assert found.results[2].at_most_greedy == at_most / 8
    assert len(found.by_step[4]) == 9
    # a steady size of 2 has no room for a bin of 4 at greedy's peak
    narrow = eviction(model, {"one": inputs}, bins=(4,), budget=2, new_tokens=4)
    assert [r.matched for r in narrow.results] == ["steady size"]


@pytest.mark.parametrize(("options", "message"), [
    ({"bins": (1,)}, "1 is greedy eviction"),
    ({"bins": ()}, "at least one bin"),
    ({"budget": "1MB"}, "not bytes"),
    ({"budget": 4, "recent": 4}, "no room beside sink"),
    ({"sink": -1}, "sink"),
    ({"rows": 0}, "prefill_rows"),
])  # fmt: skip
def test_eviction_mistakes(model: Any, inputs: dict[str, Tensor], options: dict[str, Any], message: str) -> None:
    with pytest.raises(MethodError, match=message):
        eviction(model, {"one": inputs}, new_tokens=3, **options)


def test_an_answer_of_one_token_has_no_steps(model: Any, inputs: dict[str, Tensor]) -> None:
    with pytest.raises(InputError, match="one: the answer has no decode step"):
        record(model, "one", inputs, 1)


# ---- shown


def test_shares_of_layers_and_heads(model: Any, inputs: dict[str, Tensor]) -> None:
    columns = inputs["input_ids"].shape[1]
    found = shown(model, inputs, Half(), new_tokens=2, to_the_end=True)
    (row,) = found.rows
    assert (row.label, row.heads) == ("all layers", 8)
    assert row.columns.tolist() == [float(c % 2 == 0) for c in range(columns)]
    each = shown(model, inputs, Half(), new_tokens=1, layers=[3, 1, 3], head=1, each=True).rows
    assert [(r.label, r.heads) for r in each] == [("layer 3, head 1", 1), ("layer 1, head 1", 1)]
    images = [torch.tensor([0, 1]), torch.tensor([4])]
    assert found.to_dict(images)["rows"] == [{"label": "all layers", "heads": 8, "images": [[1.0, 0.0], [1.0]]}]
    assert found.table_rows(images)[1] == {"when": "end", "label": "all layers", "image": 1, "patch": 1, "share": 0.0}
    with pytest.raises(InputError, match="no KV head 2: this model has heads 0 to 1"):
        shown(model, inputs, Half(), new_tokens=1, head=2)
    with pytest.raises(MethodError, match="layer 9 is not compressed"):
        shown(model, inputs, Half(), new_tokens=1, layers=[9])


def test_steps_of_heads_that_retrieve(model: Any, inputs: dict[str, Tensor]) -> None:
    method = HybridKV(budget=0.7, classify="all_dynamic", min_budget=1)
    found = shown(model, inputs, method, new_tokens=5, steps=True, to_the_end=True, layers=[2], head=0)
    assert [step.label for step in found.steps] == ["step 1", "step 2", "step 3", "step 4"]
    # the same run, watched by hand
    cache, tokens = passes.run(model, inputs, method, 5, to_the_end=True, trace=True)
    assert tuple(tokens) == found.tokens
    assert cache.trace is not None
    columns = cache.prompt_columns
    for step, positions in zip(found.steps, cache.trace[1:], strict=True):
        held = positions[2][0, 0]
        expected = torch.zeros(columns).index_fill(0, held[(held >= 0) & (held < columns)], 1)
        assert torch.equal(step.columns, expected)
        assert 0 < expected.mean() < 1
    assert torch.equal(found.rows[0].columns, found.steps[-1].columns)


def test_steps_that_cannot_be_shown(model: Any, inputs: dict[str, Tensor]) -> None:
    static = HybridKV(budget=0.7, classify="all_static", window=4)
    with pytest.raises(InputError, match="none of these heads retrieves"):
        shown(model, inputs, static, new_tokens=3, steps=True)
    with pytest.raises(InputError, match="no decode step"):
        shown(model, inputs, Half(), new_tokens=1, steps=True)


def test_frames_are_spread_evenly() -> None:
    assert evenly(5, 8) == [0, 1, 2, 3, 4]
    assert evenly(15, 8) == [0, 2, 4, 6, 8, 10, 12, 14]
    assert evenly(4, 1) == [0]

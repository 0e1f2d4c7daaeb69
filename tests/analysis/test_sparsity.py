"""Sparsity, overlaps and deciding layers against values by hand and against plain attention."""

from __future__ import annotations

from typing import Any

import families
import pytest
import torch
from torch import Tensor

from foveakv.analysis.deciding import deciding
from foveakv.analysis.sparsity import overlap, sparsity, would_evict
from foveakv.core.attention_stats import seeing_rows
from foveakv.errors import MethodError, NoVisualTokensError
from foveakv.methods.hae import HAE


def test_what_a_layer_would_evict() -> None:
    sums = torch.tensor([[0.0, 5, 1, 3, 2], [9.0, 1, 8, 7, 6]])
    visual = torch.tensor([[False, True, True, True, True], [True, True, True, False, False]])
    found = would_evict(sums, visual, torch.tensor([2, 1]))
    assert found.tolist() == [[False, False, True, False, True], [False, True, False, False, False]]
    evicted = torch.tensor([[False, True, True, False, False], [False] * 5])
    assert overlap(evicted, found) == [0.5, None]


def test_sparsity_and_overlap_are_those_of_plain_attention(
    model: Any, inputs: dict[str, Tensor], visual: Tensor, attention: list[Tensor]
) -> None:
    columns, pictures = len(visual), visual.nonzero().flatten()
    rows = torch.tensor([c for c in range(columns) if not visual[c] and c > int(pictures[0])])
    found = sparsity(model, {"one": inputs}, HAE(target_visual_tokens=0.5))
    (one,) = found.prompts
    seen = torch.arange(columns) <= rows[:, None]
    sums = [layer[:, rows].mean(0).sum(0) for layer in attention]
    lowest = [set(pictures[a[pictures].argsort()[: len(pictures) // 2]].tolist()) for a in sums]
    for i, layer in enumerate(attention):
        small = layer[:, rows] <= 1e-4
        for values, kind in ((one.visual, visual), (one.text, ~visual)):
            pairs = (seen & kind).expand_as(small)
            assert values[i] == pytest.approx(float(small[pairs].double().mean()), abs=2e-3)
        assert one.overlap is not None
        assert one.overlap[i] == pytest.approx(len(lowest[0] & lowest[i]) / len(lowest[0]))
        gone = torch.tensor(sorted(lowest[0]))
        assert one.lost[i] == pytest.approx(float(sums[i][gone].sum() / sums[i][pictures].sum()), abs=1e-4)
        assert one.visual_variance[i] == pytest.approx(float(sums[i][pictures].var(correction=0)), rel=1e-3)
        assert one.text_variance[i] == pytest.approx(float(sums[i][~visual].var(correction=0)), rel=1e-3)
        assert one.overall[i] == pytest.approx(float(small[seen.expand_as(small)].double().mean()), abs=2e-3)
    assert one.rule_overlap == one.overlap  # a number of tokens is the rule here
    assert one.rule_evicted == [len(pictures) // 2] * 4
    assert one.overlap[0] == 1
    assert max(one.visual) > 0.05  # the comparison is not one of zeros
    assert (one.evicted, one.visual_tokens, one.chance) == (len(pictures) // 2, len(pictures), 0.5)
    assert found.mean_overlap == pytest.approx(sum(one.overlap[1:]) / 3)
    assert found.layers_above_claim == sum(value >= 0.9 for value in one.overlap[1:]) / 3
    assert len(found.rows()) == 4


def test_evictions_by_the_same_rule(
    model: Any, inputs: dict[str, Tensor], visual: Tensor, attention: list[Tensor]
) -> None:
    rules = HAE(relative=True, r=0.9, alpha=0.2)
    found = sparsity(model, {"one": inputs}, rules)
    (one,) = found.prompts
    pictures = visual.nonzero().flatten()
    rows = [c for c in range(len(visual)) if not visual[c] and c > int(pictures[0])]
    gone = []
    for layer in attention:
        a = layer[:, rows].mean(0)[:, pictures]
        gone.append((a.sum(0) < 0.9 / len(pictures) * a.sum()) & (a.amax(0) < 0.2))
    assert one.rule_evicted == [int(each.sum()) for each in gone]
    assert len(set(one.rule_evicted)) > 1
    assert one.rule_overlap == pytest.approx([float((gone[0] & each).sum() / gone[0].sum()) for each in gone])
    assert one.rule_chance == pytest.approx([float(each.double().mean()) for each in gone])
    assert found.mean_rule_overlap == pytest.approx(sum(one.rule_overlap[1:]) / 3)
    assert found.mean_rule_chance == pytest.approx(sum(one.rule_chance[1:]) / 3)
    assert found.layers_above_claim == sum(value >= 0.9 for value in one.rule_overlap[1:]) / 3


def test_sparsity_of_all_pairs(model: Any, inputs: dict[str, Tensor], visual: Tensor, attention: list[Tensor]) -> None:
    first = int(visual.nonzero()[0])
    rows = [c for c in range(len(visual)) if not visual[c] and c > first]
    found = sparsity(model, {"one": inputs}, HAE(), per="all")
    assert found.per == found.to_dict()["per"] == "all"
    for i, layer in enumerate(attention):
        small = (layer[:, rows] <= 1e-4).double()
        assert found.prompts[0].visual[i] == pytest.approx(float(small[..., visual].mean()), abs=2e-3)
        assert found.prompts[0].overall[i] == pytest.approx(float(small.mean()), abs=2e-3)
    for options in ({"per": "some"}, {"share": 0.0}, {"share": 1.5}):
        with pytest.raises(MethodError):
            sparsity(model, {"one": inputs}, HAE(), **options)  # type: ignore[arg-type]


# ---- deciding layers


def test_a_layer_decides_by_hand() -> None:
    sums = torch.tensor([[4.0, 3, 2, 1], [1.0, 2, 3, 4], [0.0, 6, 1, 3]])
    seeing = torch.tensor([4, 3, 2, 1])
    images = torch.tensor([0, 0, 1, 1])
    found = deciding(sums, seeing, images, 0.5, "sum")
    # chosen: {0, 1}, {2, 3}, {1, 3}; each layer's best tokens are what it would choose
    assert found.kept == 0.5
    assert found.images == [[1, 0], [0, 1], [0.5, 0.5]]
    assert found.best == pytest.approx([(1 + 0 + 0.5) / 3, (0 + 1 + 0.5) / 3, (0.5 + 0.5 + 1) / 3])
    assert found.lost == pytest.approx([(0.3 + 0.7 + 0.4) / 3, (0.7 + 0.3 + 0.6) / 3, (0.6 + 0.4 + 0.1) / 3])
    # divided: [1, 1, 1, 1], [.25, .67, 1.5, 4], [0, 2, .5, 3]: chosen {0, 1}, {2, 3}, {1, 3}
    assert deciding(sums, seeing, images, 0.5, "mean").best == found.best
    one = deciding(torch.tensor([[4.0, 3, 2, 1]]), torch.tensor([8, 3, 2, 1]), images, 0.01, "mean")
    assert (one.kept, one.best) == (0.25, [1])
    assert one.lost == pytest.approx([0.7])  # token 1 stays: of 4 / 8, 1, 1 and 1 the first of the highest


def test_deciding_layers_are_those_of_plain_attention(
    model: Any, inputs: dict[str, Tensor], visual: Tensor, attention: list[Tensor]
) -> None:
    pictures = visual.nonzero().flatten().tolist()
    rows = [c for c in range(len(visual)) if not visual[c] and c > pictures[0]]
    count = round(0.4 * len(pictures))
    found = sparsity(model, {"one": inputs, "two": inputs}, HAE(), share=0.4)
    sums = [layer[:, rows].mean(0).sum(0) for layer in attention]
    for kind, one in found.prompts[0].deciding.items():
        divisor = [1 if kind == "sum" else sum(row >= c for row in rows) for c in pictures]
        chosen = []
        for a in sums:
            order = sorted(range(len(pictures)), key=lambda i: -float(a[pictures[i]]) / divisor[i])
            chosen.append({pictures[i] for i in order[:count]})
        for d in range(4):
            best = sum(len(chosen[d] & own) / count for own in chosen) / 4
            lost = sum(1 - float(a[sorted(chosen[d])].sum() / a[pictures].sum()) for a in sums) / 4
            assert one.best[d] == pytest.approx(best)
            assert one.lost[d] == pytest.approx(lost, abs=1e-4)
        assert found.deciding[kind].best == pytest.approx(one.best)
    assert found.prompts[0].deciding["sum"].best != found.prompts[0].deciding["mean"].best
    assert found.to_dict()["deciding"]["mean"]["kept"] == count / len(pictures)
    assert found.rows()[1]["deciding_lost_sum"] == found.prompts[0].deciding["sum"].lost[1]


def test_rows_that_see_a_column() -> None:
    rows, valid = torch.tensor([[1, 3, 4], [0, 2, 2]]), torch.tensor([[True, True, True], [True, True, False]])
    assert seeing_rows(rows, valid, 5, None).tolist() == [[3, 3, 2, 2, 1], [2, 1, 1, 0, 0]]

    def causal(index: Tensor) -> Tensor:
        return (torch.arange(5) <= index[..., None])[:, None]

    many, counted = rows.repeat(1, 200), valid.repeat(1, 200)
    assert seeing_rows(many, counted, 5, causal).tolist() == (200 * seeing_rows(rows, valid, 5, None)).tolist()


def test_sparsity_without_evictions_or_pictures(model: Any, inputs: dict[str, Tensor]) -> None:
    found = sparsity(model, {"one": inputs}, HAE(r=0))
    assert found.prompts[0].evicted == 0
    assert found.prompts[0].overlap is None
    assert found.mean_overlap is found.mean_rule_overlap is found.mean_rule_chance is found.layers_above_claim is None
    assert found.rows()[0]["overlap"] is None
    with pytest.raises(NoVisualTokensError, match="no image"):
        sparsity(model, {"text": families.prompt("llava", images=0)})
    with pytest.raises(MethodError, match="leave dap=False out"):
        sparsity(model, {"one": inputs}, HAE(dap=False))

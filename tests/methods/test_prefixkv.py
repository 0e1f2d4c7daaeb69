"""PrefixKV by hand: one share of attention for all layers, found here by the paper's binary search."""

from __future__ import annotations

from typing import Any

import families
import matrix
import pytest
import torch
from torch import Tensor

from foveakv.methods.prefixkv import PrefixKV, common_prefix

FAMILY = "llava"


@pytest.fixture(scope="module")
def setting() -> tuple[Any, dict[str, Any], Tensor]:
    """A model, a prompt, and every layer's attention per column, [L, C]: the sum over rows and heads."""
    model = families.build(FAMILY, dtype=torch.float64)
    inputs = families.prompt(FAMILY, dtype=torch.float64)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        layers = model(**inputs, output_attentions=True).attentions
    model.set_attn_implementation("sdpa")
    return model, inputs, torch.stack([weights[0].sum((0, 1)) for weights in layers])


@pytest.mark.parametrize("budget", [0.1, 0.3, 0.7])
def test_by_binary_search(setting: tuple[Any, dict[str, Any], Tensor], budget: float) -> None:
    """Without protected tokens: as many as hold the share p, with the largest p that fits."""
    model, inputs, scores = setting
    layers, columns = scores.shape
    total = int(budget * columns * layers)
    ranked, order = scores.sort(dim=-1, descending=True, stable=True)
    attention_sum = ranked.cumsum(-1) / ranked.sum(-1, keepdim=True)

    def sizes(p: float) -> list[int]:
        return [int((row < p).sum()) + 1 for row in attention_sum]

    low, high = 0.0, 1.0
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(sizes(middle)) <= total else (low, middle)
    want = sizes(low)
    assert total - 1 <= sum(want) <= total
    assert len(set(want)) > 1, "the layers of this model do not differ"

    run = matrix.compressed(model, PrefixKV(budget=budget, sink=0, recent=0), inputs, max_new_tokens=1)
    told = run.cache.results.figures
    assert told["tokens"] == [want]
    assert abs(told["share"][0] - low) < 0.05
    for layer, size in enumerate(want):
        for held in run.cache.kept(layer)[0].tolist():  # all heads alike
            assert held == sorted(order[layer, :size].tolist())


def test_sinks_and_the_last_token_stay(setting: tuple[Any, dict[str, Any], Tensor]) -> None:
    model, inputs, scores = setting
    columns = scores.shape[1]
    run = matrix.compressed(model, PrefixKV(budget=7, sink=3, recent=2), inputs, max_new_tokens=1)
    for layer in range(len(scores)):
        assert {0, 1, 2, columns - 2, columns - 1} <= set(run.cache.kept(layer)[0, 0].tolist())
    run = matrix.compressed(model, PrefixKV(budget=3, sink=3, recent=2), inputs, max_new_tokens=1)
    for layer in range(len(scores)):  # too few for all: the newest first, then the oldest, in every layer alike
        assert run.cache.kept(layer)[0, 0].tolist() == [0, columns - 2, columns - 1]


def test_common_prefix_on_numbers() -> None:
    scores = torch.tensor([[[8.0, 1.0, 1.0, 0.0], [1.0, 3.0, 2.0, 4.0]], [[2.0, 1.0, 0.0, 0.0], [1.0, 1.0, 0.0, 0.0]]])
    real = torch.tensor([[True, True, True, True], [True, True, False, False]])
    none = torch.zeros(2, 4, dtype=torch.int64)
    # shares before an entry: layer 0: 0, .8, .9, 1; layer 1: 0, .4, .7, .9. Padded row: 0, .67 and 0, .5.
    keep, share = common_prefix(scores, real, none, torch.tensor([4, 3]))
    assert keep[0].tolist() == [[True, False, False, False], [False, True, True, True]]
    assert keep[1].tolist() == [[True, False, False, False], [True, True, False, False]]
    assert torch.allclose(share, torch.tensor([0.7, 0.5], dtype=torch.float64))
    # a protected column costs nothing, and its share counts
    first = torch.tensor([[0, 0, 0, 1], [0, 0, 0, 0]])
    keep, _ = common_prefix(scores, real, first, torch.tensor([4, 99]))
    # layer 0: 3 is protected, then 0 (0), .8, .9; layer 1: 3 is protected, then 1 (.4), .7, .9
    assert keep[0].tolist() == [[True, False, False, True], [False, True, False, True]]
    assert keep[1].tolist() == [[True, True, False, False]] * 2


@pytest.mark.parametrize("budget", [0.03, 0.1, 0.37, 0.8, 1.0, 3])
def test_the_budget_is_true(budget: Any) -> None:
    model, batch = matrix.model(FAMILY, torch.float64), families.batch(FAMILY, dtype=torch.float64)
    run = matrix.compressed(model, PrefixKV(budget=budget), batch.inputs, max_new_tokens=1)
    geometry = run.cache.geometry
    for b, context in enumerate(geometry.contexts):
        slots = sum(int((held[b] >= 0).sum()) for held in matrix.positions_held(run))
        if isinstance(budget, float):
            assert slots <= max(budget * context * geometry.heads, geometry.heads)
            assert slots > budget * context * geometry.heads - geometry.kv_heads or budget < 0.1
        else:
            assert slots == budget * geometry.heads

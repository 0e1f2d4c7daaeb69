"""MixKV's scores against sums over pairs of keys, and a model's choice against the rule worked out by hand."""

from __future__ import annotations

import math
from typing import Any

import families
import pytest
import torch
from torch import Tensor

import foveakv
from foveakv import MixKV
from foveakv.methods.mixkv import key_similarity, scaled_like

FAMILY, LAYER, WINDOW, BUDGET = "llava", 1, 6, 20


def test_redundancy_is_the_mean_cosine_of_pairs() -> None:
    torch.manual_seed(0)
    keys = torch.randn(2, 3, 7, 4, dtype=torch.float64) + 0.7
    real = torch.tensor([[True] * 7, [False, False, True, True, True, True, True]])
    similarity, redundancy = key_similarity(keys, real)
    for b in range(2):
        for h in range(3):
            own = [k / k.norm() for k, is_real in zip(keys[b, h], real[b], strict=True) if is_real]
            pairs = [float(own[i] @ own[j]) for i in range(len(own)) for j in range(len(own)) if i != j]
            assert float(redundancy[b, h]) == pytest.approx(max(0.0, sum(pairs) / len(pairs)))
            mean = torch.stack(own).mean(0)
            assert similarity[b, h][real[b]].tolist() == pytest.approx([float(u @ mean) for u in own])


def test_equal_opposite_and_single_keys() -> None:
    same = torch.ones(1, 1, 5, 4)
    opposite = torch.tensor([[[[1.0, 0.0], [-1.0, 0.0]]]])
    for keys, want in ((same, 1.0), (opposite, 0.0), (same[:, :, :1], 0.0)):  # opposite: -1, clipped
        redundancy = key_similarity(keys, torch.ones(keys.shape[0], keys.shape[2], dtype=torch.bool))[1]
        assert float(redundancy) == pytest.approx(want, abs=1e-6)


def test_scaling() -> None:
    """2, 4, 6 -> 0, 0.5, 1 (mean 0.5), brought to the mean of the scores, 0.3; other columns take no part."""
    values = torch.tensor([2.0, 100.0, 4.0, 6.0])
    score = torch.tensor([0.1, 9.0, 0.2, 0.6])
    candidates = torch.tensor([True, False, True, True])
    scaled = scaled_like(values, score, candidates)
    assert scaled[candidates].tolist() == pytest.approx([0.0, 0.3, 0.6])
    assert scaled_like(torch.ones(4), score, candidates)[candidates].tolist() == [0, 0, 0]
    assert bool(torch.isfinite(scaled_like(values, score, torch.zeros(4, dtype=torch.bool))).all())


@pytest.fixture(scope="module")
def setting() -> tuple[Any, dict[str, Any], Tensor, Tensor, Tensor]:
    """A model, a prompt, and one layer's window attention [H, C], keys and values [H, C, D]."""
    model = families.build(FAMILY, dtype=torch.float64)
    inputs = families.prompt(FAMILY, dtype=torch.float64)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        out = model(**inputs, output_attentions=True, use_cache=True)
    model.set_attn_implementation("sdpa")
    layer = out.past_key_values.layers[LAYER]
    heads = layer.keys.shape[1]
    weights = out.attentions[LAYER][0].view(heads, -1, layer.keys.shape[2], layer.keys.shape[2])
    return model, inputs, weights[:, :, -WINDOW:].mean((1, 2)), layer.keys[0], layer.values[0]


def zero_to_one(values: list[float]) -> list[float]:
    return [(value - min(values)) / (max(values) - min(values)) for value in values]


def to_mean(values: list[float], like: list[float]) -> list[float]:
    return [value * (sum(like) / len(like)) / (sum(values) / len(values)) for value in values]


@pytest.mark.parametrize("intrinsic", ["value_norm", "key_norm", "none"])
def test_choice_by_hand(setting: tuple[Any, dict[str, Any], Tensor, Tensor, Tensor], intrinsic: Any) -> None:
    model, inputs, attention, keys, values = setting
    columns, early = attention.shape[1], attention.shape[1] - WINDOW
    with foveakv.compress(model, MixKV(budget=BUDGET, window=WINDOW, kernel=3, intrinsic=intrinsic)) as session:
        model.generate(**inputs, max_new_tokens=1)
        kept = [set(row.tolist()) for row in session.kept(LAYER)[0]]
    differs = False
    for head in range(len(attention)):
        raw = [*attention[head, :early].tolist(), 0.0]  # the window counts as 0
        pooled = [sum(raw[max(c - 1, 0) : c + 2]) / 3 for c in range(early)]
        units = [key / key.norm() for key in keys[head]]
        mean = torch.stack(units).mean(0)
        pairs = torch.stack(units) @ torch.stack(units).T
        r = max(0.0, float(pairs.sum() - columns) / (columns * (columns - 1)))
        diversity = to_mean(zero_to_one([-float(units[c] @ mean) for c in range(early)]), pooled)
        lengths = {
            "value_norm": [math.sqrt(float(values[head, c] @ values[head, c])) for c in range(early)],
            "key_norm": [-math.sqrt(float(keys[head, c] @ keys[head, c])) for c in range(early)],
        }
        norm = to_mean(zero_to_one(lengths[intrinsic]), pooled) if intrinsic in lengths else [0.0] * early
        score = [r * diversity[c] + (1 - r) * (pooled[c] + norm[c]) for c in range(early)]
        best = sorted(range(early), key=lambda c, s=score: (-s[c], c))[: BUDGET - WINDOW]
        assert kept[head] == {*best, *range(early, columns)}
        snap = sorted(range(early), key=lambda c, s=pooled: (-s[c], c))[: BUDGET - WINDOW]
        differs |= set(best) != set(snap)
    assert differs, "the mix made no difference to SnapKV"

"""PyramidKV: layer budgets worked out by hand, and what a model then holds."""

from __future__ import annotations

import itertools
from typing import Any

import families
import matrix
import pytest
import torch

import foveakv
from foveakv import PyramidKV
from foveakv.methods.pyramidkv import pyramid


@pytest.mark.parametrize(("mean", "most", "layers", "beta", "want"), [
    (20, 100, 5, 20, [39, 29, 20, 11, 1]),  # 39, 29.5, 20, 10.5, 1: sums 39, 68, 88, 99, 100 rounded down
    (40, 1000, 3, 20, [78, 40, 2]),
    (40, 60, 3, 20, [60, 40, 20]),  # the prompt holds 60 beyond the window: a flatter line
    (40, 40, 3, 20, [40, 40, 40]),
    (0, 10, 3, 20, [0, 0, 0]),
    (7, 10, 1, 20, [7]),
    (10, 100, 3, 1, [10, 10, 10]),
])  # fmt: skip
def test_lines_by_hand(mean: int, most: int, layers: int, beta: int, want: list[int]) -> None:
    assert pyramid(mean, most, layers, beta) == want


def test_lines_hold_their_total_and_fall() -> None:
    for mean in range(40):
        for most in (mean, mean + 1, mean + 7, 3 * mean + 5):
            for layers in (1, 2, 3, 4, 7, 28):
                line = pyramid(mean, most, layers, 20)
                assert len(line) == layers
                assert sum(line) == layers * mean
                assert 0 <= min(line) <= max(line) <= most
                assert all(later <= earlier + 1 for earlier, later in itertools.pairwise(line))


def test_layers_of_a_model() -> None:
    """36 columns, budget 18, window 6, kept whole: 12 beyond it in the mean, 24, 16, 8 and 0 by layer."""
    model, inputs = matrix.model("llama", torch.float64), families.prompt("llama", images=0, text=36)
    columns = inputs["input_ids"].shape[1]
    run = matrix.compressed(model, PyramidKV(budget=18, window=6, window_share=1), inputs, max_new_tokens=1)
    held = matrix.positions_held(run)
    assert [positions.shape[-1] for positions in held] == [30, 22, 14, 6]
    for positions in held:
        assert set(range(columns - 6, columns)) <= set(positions[0, 0].tolist())
        assert set(range(columns - 6, columns)) <= set(positions[0, 1].tolist())


@pytest.mark.parametrize("budget", [1, 3, 0.1, 0.3, 0.5, 0.9, 1.0, "20KiB"])
def test_the_budget_is_true(budget: Any) -> None:
    model, batch = matrix.model("llava"), families.batch("llava")
    for name in ("pyramidkv", "sparsemm", "mixkv"):
        with foveakv.compress(model, matrix.method(name, budget=budget)) as session:
            model.generate(**batch.inputs, max_new_tokens=1)
            cache = session.cache
        allowed = cache.request.budget_tokens(budget) * families.LAYERS * families.KV_HEADS
        stored = sum(layer.segments.lengths.sum(-1) for layer in cache.compressed)
        assert torch.equal(stored, allowed), name  # not one slot more, and none wasted
        assert bool((stored <= cache.full_prompt.lengths * families.LAYERS * families.KV_HEADS).all())


def test_at_beta_one_it_is_snapkv() -> None:
    model, inputs = matrix.model("llava", torch.float64), families.batch("llava", dtype=torch.float64).inputs
    flat = matrix.compressed(model, PyramidKV(budget=0.5, window=6, beta=1), inputs)
    snap = matrix.compressed(model, matrix.method("snapkv"), inputs)
    assert torch.equal(flat.tokens, snap.tokens)
    for own, other in zip(matrix.positions_held(flat), matrix.positions_held(snap), strict=True):
        assert torch.equal(own, other)

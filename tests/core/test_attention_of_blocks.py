"""Attention statistics of a further block: fewer query rows than columns, and heads with masks of their own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from foveakv.core.attention_stats import (
    attention_rows,
    column_sums,
    head_mean_stats,
    seeing_rows,
    sparsity,
    topk_attention,
    window_scores,
)
from foveakv.core.fused_columns import Fused
from foveakv.errors import InputError
from foveakv.kernels import cpu_columns
from foveakv.kernels.build import KERNEL

B, H, G, C, D = 3, 2, 3, 29, 8
SCALING = D**-0.5
CLOSE = {"rtol": 0, "atol": 1e-12}


def layer(q: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(q)
    query = 3 * torch.randn(B, H * G, q, D, generator=g, dtype=torch.float64)
    return query, torch.randn(B, H, C, D, generator=g, dtype=torch.float64)


def mask_of(q: int, heads: int, seed: int = 5) -> Tensor:
    """bool [B, heads, C, C]: causal with holes before the block; one row sees nothing, another nothing in head 0."""
    g = torch.Generator().manual_seed(seed)
    stored = torch.rand(B, heads, C, generator=g) < 0.4
    stored[..., C - q :] = True
    mask = torch.ones(C, C, dtype=torch.bool).tril() & stored[:, :, None]
    mask[1, :, C - 1] = False
    mask[2, 0, C - q] = False
    return mask


def lookup(mask: Tensor) -> Callable[[Tensor], Tensor]:
    def visible(rows: Tensor) -> Tensor:
        return mask.gather(2, rows[:, None, :, None].expand(-1, mask.shape[1], -1, C))

    return visible


def dense(query: Tensor, keys: Tensor, mask: Tensor) -> Tensor:
    """Probabilities [B, H, G, C, C]; 0 in rows without a query and for what the mask hides."""
    whole = torch.cat([query.new_zeros(B, H * G, C - query.shape[2], D), query], 2).view(B, H, G, C, D)
    logits = whole @ keys[:, :, None].mT * SCALING
    probs = logits.masked_fill(~mask[:, :, None], -torch.inf).softmax(-1).nan_to_num(0)
    has_query = torch.arange(C) >= C - query.shape[2]
    return probs * has_query[:, None]


def some_rows(q: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(1)
    rows = torch.stack([torch.randperm(C, generator=g)[:13].sort().values for _ in range(B)])
    rows[:, -1] = C - 1
    rows[:, -2] = C - q
    return rows, torch.rand(B, 13, generator=g) < 0.8


@pytest.fixture(params=[1, 7, C], ids=lambda q: f"q{q}")
def q(request: pytest.FixtureRequest) -> int:
    return request.param


@pytest.fixture(params=[1, H, None], ids=["shared mask", "masks of heads", "causal"])
def mask(request: pytest.FixtureRequest, q: int) -> Tensor | None:
    return None if request.param is None else mask_of(q, request.param)


@pytest.mark.parametrize("tile_bytes", [1, 4000, None])
def test_every_statistic_equals_the_dense_definition(q: int, mask: Tensor | None, tile_bytes: int | None) -> None:
    query, keys = layer(q)
    rows, valid = some_rows(q)
    shown = torch.ones(C, C, dtype=torch.bool).tril().expand(B, 1, C, C) if mask is None else mask
    visible = None if mask is None else lookup(mask)
    counted = valid & (rows >= C - q)
    index = rows[:, None, None, :, None].expand(-1, H, G, -1, C)
    probs = dense(query, keys, shown).gather(3, index) * counted[:, None, None, :, None]
    pairs = lookup(shown)(rows).expand(-1, H, -1, -1) & counted[:, None, :, None]  # [B, H, n, C]
    counted = pairs.any(-1).any(1)
    given = query, keys, rows, valid, SCALING, visible

    got = attention_rows(query, keys, rows, SCALING, visible, valid, tile_bytes=tile_bytes)
    torch.testing.assert_close(got, probs, **CLOSE)
    torch.testing.assert_close(column_sums(*given, tile_bytes=tile_bytes), probs.sum((2, 3)), **CLOSE)

    stats = head_mean_stats(*given, tile_bytes=tile_bytes)
    assert torch.equal(stats.counts, counted.sum(1))
    mean = probs.mean((1, 2))
    for b in range(B):
        own = mean[b, counted[b]] if counted[b].any() else mean.new_zeros(1, C)
        torch.testing.assert_close(stats.sums[b], own.sum(0), **CLOSE)
        torch.testing.assert_close(stats.maxima[b], own.amax(0), **CLOSE)
        torch.testing.assert_close(stats.variance[b], own.var(0, correction=0), **CLOSE)

    best = probs.sort(-1, descending=True).values[..., :4].sum((2, 3, 4))
    got = topk_attention(*given, 4, tile_bytes=tile_bytes)
    torch.testing.assert_close(got, best / (counted.sum(1).clamp_min(1) * G)[:, None], **CLOSE)

    columns = torch.arange(C).expand(B, C) % 3 == 0
    both = pairs & columns[:, None, None]
    small = ((probs <= 1e-2) & both[:, :, None]).sum((1, 2, 3, 4)).double()
    total = both.sum((1, 2, 3)) * G
    got = sparsity(*given, (columns,), threshold=1e-2, tile_bytes=tile_bytes)
    torch.testing.assert_close(got[0], torch.where(total > 0, small / total.clamp_min(1), 0), **CLOSE)
    assert torch.equal(seeing_rows(rows, valid, C, visible, C - q), pairs.any(1).sum(1))


@pytest.mark.parametrize("window", [1, 5, 20, 40])
def test_a_window_has_rows_of_the_block_only(q: int, mask: Tensor | None, window: int) -> None:
    query, keys = layer(q)
    shown = torch.ones(C, C, dtype=torch.bool).tril().expand(B, 1, C, C) if mask is None else mask
    probs = dense(query, keys, shown)[..., -min(window, q) :, :]
    count = shown[:, :, -min(window, q) :].any(-1).any(1).sum(1)
    got = window_scores(query, keys, window, SCALING, None if mask is None else lookup(mask))
    torch.testing.assert_close(got, probs.sum((2, 3)) / (count.clamp_min(1) * G)[:, None, None], **CLOSE)


def test_keys_that_are_hidden_in_a_head_do_not_matter(q: int) -> None:
    query, keys = layer(q)
    mask = mask_of(q, H)
    rows = torch.arange(C).expand(B, C)
    holes = ~mask.any(2)  # [B, H, C]
    other = keys.masked_fill(holes[..., None], 1e4)
    for function in (column_sums, head_mean_stats):
        first = function(query, keys, rows, None, SCALING, lookup(mask))
        second = function(query, other, rows, None, SCALING, lookup(mask))
        torch.testing.assert_close(first, second, **CLOSE)


@pytest.mark.skipif(KERNEL.problem() is not None, reason="no CPU kernel here")
@pytest.mark.parametrize("tile_bytes", [1, 4000, None])
def test_fused_sums_of_a_block(q: int, mask: Tensor | None, tile_bytes: int | None) -> None:
    assert isinstance(cpu_columns, Fused)
    query, keys = layer(q)
    rows, valid = some_rows(q)
    visible = None if mask is None else lookup(mask)
    wanted = column_sums(query, keys, rows, valid, SCALING, visible)
    made = column_sums(
        query.float(), keys.float(), rows, valid, SCALING, visible, fused=cpu_columns, tile_bytes=tile_bytes
    )
    torch.testing.assert_close(made.double(), wanted, rtol=2e-6, atol=2e-6)


def test_sums_over_whole_columns_are_not_asked_for_masks_of_heads() -> None:
    class Whole:
        asked = 0

        def column_sums(self, job: object) -> Tensor:
            self.asked += 1
            return torch.zeros(B, H, C)

    whole = Whole()
    query, keys = (tensor.float() for tensor in layer(7))
    rows = torch.arange(C).expand(B, C)
    assert column_sums(query, keys, rows, None, SCALING, lookup(mask_of(7, H)), fused=whole).any()
    assert whole.asked == 0
    column_sums(query, keys, rows, None, SCALING, lookup(mask_of(7, 1)), fused=whole)
    assert whole.asked == 1


def test_more_rows_than_columns_are_refused() -> None:
    query, keys = layer(C)
    with pytest.raises(InputError, match="one layer"):
        column_sums(query, keys[:, :, 1:], torch.zeros(B, 1, dtype=torch.int64), None, SCALING)

"""Fused column sums of attention against the float64 reference of tensor operations."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from foveakv.core.attention_stats import column_sums, topk_attention, window_scores
from foveakv.core.row_tiles import Visible
from foveakv.kernels import cpu_columns
from foveakv.kernels.build import KERNEL

pytestmark = pytest.mark.skipif(KERNEL.problem() is not None, reason="no CPU kernel here")


def inputs(batch: int, heads: int, group: int, columns: int, dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(columns)
    query = 3 * torch.randn(batch, heads * group, columns, dim, generator=generator)
    return query.to(dtype), torch.randn(batch, heads, columns, dim, generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("batch", "heads", "group", "columns", "dim"),
    [(1, 3, 3, 301, 20), (2, 2, 1, 64, 16), (1, 1, 7, 150, 9), (3, 2, 2, 5, 8)],
)
def test_sums_equal_the_reference(
    batch: int, heads: int, group: int, columns: int, dim: int, dtype: torch.dtype
) -> None:
    query, keys = inputs(batch, heads, group, columns, dim, dtype)
    rows = torch.arange(columns).expand(batch, columns)
    valid = torch.ones(batch, columns, dtype=torch.bool)
    wanted = column_sums(query.double(), keys.double(), rows, valid, dim**-0.5)
    made = column_sums(query, keys, rows, valid, dim**-0.5, fused=cpu_columns)
    assert made.dtype == torch.float32
    # Every row's probabilities are summed, in float32: what a column gets is at most group * columns.
    torch.testing.assert_close(made.double(), wanted, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("tile_bytes", [None, 1, 4000])
def test_rows_that_do_not_count_and_masks(tile_bytes: int | None) -> None:
    batch, heads, group, columns = 2, 2, 3, 70
    query, keys = inputs(batch, heads, group, columns, 16, torch.float32)
    generator = torch.Generator().manual_seed(1)
    rows = torch.stack([torch.randperm(columns, generator=generator)[:41] for _ in range(batch)])
    valid = torch.rand(batch, 41, generator=generator) < 0.7
    padding = torch.tensor([0, 9])

    def visible(rows: Tensor) -> Tensor:
        column = torch.arange(columns)
        return ((column <= rows[..., None] + 3) & (column >= padding[:, None, None]))[:, None]

    for mask in (None, visible):
        wanted = column_sums(query.double(), keys.double(), rows, valid, 0.25, mask)
        made = column_sums(query, keys, rows, valid, 0.25, mask, fused=cpu_columns, tile_bytes=tile_bytes)
        torch.testing.assert_close(made.double(), wanted, rtol=2e-6, atol=2e-6)
    none = torch.zeros_like(valid)
    assert not column_sums(query, keys, rows, none, 0.25, fused=cpu_columns).any()


def left_padding(padding: Tensor, columns: int) -> Visible:
    """Causal attention that does not see the first padding[b] columns, and counts how many rows were asked for."""

    def visible(rows: Tensor) -> Tensor:
        visible.asked += rows.numel()  # type: ignore[attr-defined]
        column = torch.arange(columns)
        return ((column <= rows[..., None]) & (column >= padding[:, None, None]))[:, None]

    visible.asked = 0  # type: ignore[attr-defined]
    return visible


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tile_bytes", [None, 30_000])
def test_left_padding_reads_every_row_of_the_mask_once(tile_bytes: int | None, dtype: torch.dtype) -> None:
    batch, heads, group, columns = 4, 2, 7, 150
    query, keys = inputs(batch, heads, group, columns, 16, dtype)
    rows = torch.arange(columns).expand(batch, columns)
    padding = torch.tensor([0, 31, 7, 149])
    valid = rows >= padding[:, None]
    wanted = column_sums(query.double(), keys.double(), rows, valid, 0.25, left_padding(padding, columns))
    visible = left_padding(padding, columns)
    made = column_sums(query, keys, rows, valid, 0.25, visible, fused=cpu_columns, tile_bytes=tile_bytes)
    torch.testing.assert_close(made.double(), wanted, rtol=2e-6, atol=2e-6)
    assert visible.asked == rows.numel()  # type: ignore[attr-defined]


@pytest.mark.parametrize("padded", [False, True])
def test_window_scores_equal_the_reference(padded: bool) -> None:
    batch, columns = 3, 90
    query, keys = inputs(batch, 2, 3, columns, 16, torch.float32)
    padding = torch.tensor([0, 40, 86])
    real = torch.arange(columns) >= padding[:, None] if padded else None
    visible = left_padding(padding, columns) if padded else None
    wanted = window_scores(query.double(), keys.double(), 8, 0.25, visible, real)
    made = window_scores(query, keys, 8, 0.25, visible, real, fused=cpu_columns)
    torch.testing.assert_close(made.double(), wanted, rtol=2e-6, atol=2e-6)


def test_float64_stays_float64() -> None:
    query, keys = inputs(1, 1, 2, 30, 8, torch.float64)
    rows = torch.arange(30)[None]
    made = column_sums(query, keys, rows, None, 0.3, fused=cpu_columns)
    assert made.dtype == torch.float64
    assert torch.equal(made, column_sums(query, keys, rows, None, 0.3))


def test_nan_reaches_the_columns_of_its_row() -> None:
    query, keys = inputs(1, 1, 1, 40, 8, torch.float32)
    query[0, 0, 20] = torch.nan
    made = column_sums(query, keys, torch.arange(40)[None], None, 0.3, fused=cpu_columns)
    assert made[0, 0, :21].isnan().all()
    assert made[0, 0, 21:].isfinite().all()


def test_threads_change_nothing_but_rounding() -> None:
    query, keys = inputs(1, 1, 4, 700, 32, torch.float32)
    rows, before = torch.arange(700)[None], torch.get_num_threads()
    made = []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            made.append(column_sums(query, keys, rows, None, 0.2, fused=cpu_columns))
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(*made, rtol=2e-6, atol=2e-6)


def test_tensors_that_do_not_fit_are_refused() -> None:
    scores, stop, sums = torch.zeros(1, 2, 6, 8), torch.full((1, 3), 8), torch.zeros(1, 2, 8)
    cpu_columns.add(scores, stop, None, sums)
    for wrong in (
        (scores.double(), stop, None, sums),
        (scores, stop.int(), None, sums),
        (scores, stop[:, :0], None, sums),
        (scores[..., :7], stop, None, sums),
        (scores, stop, torch.zeros(1, 2, 8, dtype=torch.bool), sums),
    ):
        with pytest.raises(ValueError, match="do not belong together"):
            cpu_columns.add(*wrong)


@pytest.mark.parametrize("k", [1, 2, 7, 40, 100])
def test_largest_with_ties(k: int) -> None:
    generator = torch.Generator().manual_seed(k)
    values = torch.rand(2, 5, 40, generator=generator)
    values[1] = torch.randint(0, 3, (5, 40), generator=generator) / 4
    values[0, 0] = 0
    wanted = values.double().topk(min(k, 40)).values.sum((1, 2))
    torch.testing.assert_close(cpu_columns.largest(values, k), wanted, rtol=1e-6, atol=1e-6)
    for column in (3, 39):  # in a vector of numbers, and after the last whole one
        for sign in (1, -1):
            strange = values.clone()
            strange[0, 1, column] = torch.copysign(torch.tensor(torch.nan), torch.tensor(sign))
            assert cpu_columns.largest(strange, k).isnan().tolist() == [True, False]


def test_topk_attention_equals_the_reference() -> None:
    query, keys = inputs(2, 2, 3, 90, 16, torch.float32)
    rows = torch.arange(20, 90).expand(2, 70)
    valid = torch.arange(70) % torch.tensor([[3], [5]]) > 0
    for k in ([3, 9], [200, 1]):
        wanted = topk_attention(query.double(), keys.double(), rows, valid, 0.25, None, k)
        made = topk_attention(query, keys, rows, valid, 0.25, None, k, fused=cpu_columns)
        torch.testing.assert_close(made.double(), wanted, rtol=2e-6, atol=2e-6)

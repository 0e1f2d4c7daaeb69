"""What attention kernels see of a layer's stored keys and values.

Notation: B sequences, H KV heads, R = B * H runs (run r = b * H + h), M = longest run, N = rows of the flat buffers.
"Padded run coordinates" [B, H, M] address slot m of run (b, h); entries at or beyond the run's length are padding.

Keys and values of a run are either contiguous rows, or pages of T rows that a table names (`Runs.table`): slot m of run
r is then row table[r, m // T] * T + m % T. Positions and side fields are contiguous in both cases.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from foveakv.memory.quantizer import Quantizer
from foveakv.memory.residual import Residual


@dataclass
class Runs:
    """One run of slots per (sequence, KV head), as plain tensors. A new object for every change."""

    keys: Tensor  # [N, D], or uint8 rows of a quantizer; rows outside the runs are slack: undefined, may be NaN
    values: Tensor  # [N, Dv], as the keys
    positions: Tensor  # [N] int32; with a table as many rows as `start` needs
    start: Tensor  # [R] int64 on the keys' device: first row of every run, in ascending order; with a table, its first
    # entry in positions, side fields and `residual.slot_entry`
    length: Tensor  # [R] int64 on the keys' device
    batch: int
    heads: int
    max_length: int
    uniform: bool  # every run has max_length slots and starts at r * (N // R): without a table, dense views exist
    start_host: Tensor | None = None  # CPU copies of start and length: planning needs no device synchronisation
    length_host: Tensor | None = None
    quantizer: Quantizer | None = None  # how uint8 rows are dequantized; None: rows are numbers
    residual: Residual | None = None  # full-precision copies of some slots, read in place of their quantized rows
    table: Tensor | None = None  # int32 [R, K] on the keys' device: the pages of every run, -1 beyond; None: contiguous
    page_size: int = 0  # T, rows of a page: page p is rows p * T ... p * T + T - 1 of keys and values
    table_host: Tensor | None = None  # the table on the CPU

    @property
    def dense_views(self) -> bool:
        """Whether keys and values can be seen as [B, H, M, ...] without a copy."""
        return self.uniform and self.table is None


def dense(runs: Runs) -> tuple[Tensor, Tensor]:
    """Strided views keys [B, H, M, D] and values [B, H, M, Dv] of uniform runs (no copy).

    ValueError: runs that are not uniform.
    """
    if not runs.dense_views:
        raise ValueError("dense views exist for uniform contiguous runs only; use Segments.gather() for padded copies")
    shape = (runs.batch, runs.heads, runs.keys.shape[0] // (runs.batch * runs.heads), -1)
    return runs.keys.view(shape)[:, :, : runs.max_length], runs.values.view(shape)[:, :, : runs.max_length]


def run_rows(runs: Runs, run: int, first: int, length: int) -> slice | Tensor:
    """The rows of keys and values that hold the slots of run `run`, in order: a slice where they are contiguous.

    first, length: `start` and `length` of the run, on the host.
    """
    if runs.table is None:
        return slice(first, first + length)
    size, pages = runs.page_size, (runs.table if runs.table_host is None else runs.table_host)[run]
    pages = pages[: -(-length // size)].to(torch.int64)
    at = int(pages[0]) if len(pages) else 0
    if torch.equal(pages, torch.arange(at, at + len(pages), device=pages.device)):
        return slice(at * size, at * size + length)
    pages = pages.to(runs.keys.device)
    rows = (pages[:, None] * size + torch.arange(size, device=pages.device)).view(-1)
    return rows[:length]


def padded_rows(runs: Runs) -> tuple[Tensor, Tensor]:
    """Rows of keys and values of every padded run coordinate, int64 [R, M], and which are stored, bool [R, M].

    Padding repeats a run's last slot; a run without slots names some row of the buffers.
    """
    slots = torch.arange(runs.max_length, device=runs.keys.device)
    inside = torch.minimum(slots, (runs.length[:, None] - 1).clamp_(min=0))
    if runs.table is None:
        rows = inside + runs.start[:, None].clamp(max=runs.keys.shape[0] - 1)
    else:
        page = runs.table.gather(1, inside // runs.page_size).clamp_(min=0).to(torch.int64)
        rows = page * runs.page_size + inside % runs.page_size
    return rows, slots < runs.length[:, None]


def contiguous(runs: Runs) -> Runs:
    """The same runs without a page table: a copy of keys and values, padded to the longest run."""
    if runs.table is None:
        return runs
    total, longest = runs.batch * runs.heads, runs.max_length
    rows = padded_rows(runs)[0].view(-1)
    start = torch.arange(total) * longest
    residual = runs.residual
    if residual is not None:
        slots = torch.arange(longest, device=runs.start.device)
        at = (runs.start[:, None] + slots).clamp_(max=residual.slot_entry.shape[0] - 1).view(-1)
        residual = replace(residual, slot_entry=residual.slot_entry[at])
    return replace(
        runs, keys=runs.keys.index_select(0, rows), values=runs.values.index_select(0, rows),
        positions=torch.zeros(len(rows), dtype=torch.int32, device=rows.device), start=start.to(rows.device),
        start_host=start, residual=residual, table=None, table_host=None, page_size=0,
    )  # fmt: skip

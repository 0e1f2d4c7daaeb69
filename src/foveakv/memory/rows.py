"""Rows of the flat buffers: which ones belong to a run, and which go where.

Notation: R runs, run r has length[r] rows from start[r] on.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor


def moves(start: Tensor, length: Tensor, slots: Tensor, counts: list[int]) -> tuple[Tensor, Tensor]:
    """The copies that `Segments.evict` makes, one for every entry of slots: row source [m] to row target [m].

    slots [R, n]; counts [B], R is a multiple of B. Pairs that need no move copy a row onto itself or repeat another.
    """
    n, runs = slots.shape[-1], slots.shape[0]
    count = torch.tensor(counts, device=slots.device).repeat_interleave(runs // len(counts))[:, None]  # [R, 1]
    end = length[:, None] - count  # the runs' new lengths
    number = torch.arange(n, device=slots.device)
    leaving = number < count
    hole = leaving & (slots < end)
    at_end = slots.sub(end).masked_fill_(hole | ~leaving, n)  # which of the last slots are evicted themselves
    gone = torch.zeros(runs, n + 1, dtype=torch.bool, device=slots.device).scatter_(1, at_end, True)
    staying = leaving & ~gone[:, :n]  # as many as there are holes
    holes = (~hole).to(torch.int8).argsort(dim=-1, stable=True)  # holes first, in the order given
    tail = (~staying).to(torch.int8).argsort(dim=-1, stable=True)
    filled = number < hole.sum(-1, keepdim=True)
    target = torch.where(filled, slots.gather(1, holes), 0)
    source = torch.where(filled, end + tail, 0)
    # Fill up with the run's first pair; a run without any copies its first row onto itself.
    target, source = (torch.where(filled, rows, rows[:, :1]) for rows in (target, source))
    return (start[:, None] + target).view(-1), (start[:, None] + source).view(-1)


def equal_lengths(runs: int, length: int, device: torch.device) -> Tensor:
    """The lengths [R] of equally long runs; shared by the layers of a cache, which grow in step, and never written.

    On a device they are shared within a stream only: another one might read them before they are filled.
    """
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    return _equal_lengths(runs, length, device, stream)


@functools.lru_cache(maxsize=64)
def _equal_lengths(runs: int, length: int, device: torch.device, stream: int) -> Tensor:
    with torch.inference_mode(False):
        return torch.full((runs,), length, dtype=torch.int64, device=device)


def flat(start: Tensor, length: Tensor, total: int) -> Tensor:
    """Rows start[r], start[r] + 1, ... start[r] + length[r] - 1 of all runs, one after another: [total] int64."""
    shift = start - (length.cumsum(0) - length)
    return torch.repeat_interleave(shift, length, output_size=total) + torch.arange(total, device=start.device)


def take(target: Tensor, source: Tensor, target_rows: Tensor, source_rows: Tensor) -> None:
    """target[target_rows] = source[source_rows] without a temporary: slack rows get a copy of some stored row."""
    if source.shape[0] == 0 or source_rows.shape[0] == 0:
        return
    chosen = torch.zeros(target.shape[0], dtype=torch.int64, device=target.device)
    chosen.index_copy_(0, target_rows, source_rows)
    with torch.no_grad():
        torch.index_select(source, 0, chosen, out=target)


def shift(buffer: Tensor, target_rows: Tensor, source_rows: Tensor) -> None:
    """buffer[target_rows] = buffer[source_rows] in place, for ascending rows with target_rows <= source_rows."""
    copy_rows(buffer, buffer, target_rows, source_rows)


def copy_rows(target: Tensor, source: Tensor, target_rows: Tensor, source_rows: Tensor) -> None:
    """target[target_rows] = source[source_rows], converted where the dtypes differ.

    Goes through the rows in portions, which are copied several times faster than everything at once through fresh
    memory. Both may be the same buffer as long as no row is a target before it is a source.
    """
    portion = 2**18 if target.device.type == "cpu" else 2**24  # bytes
    step = max(1, portion // max(1, target[:1].numel() * target.element_size()))
    for low in range(0, source_rows.shape[0], step):
        part = slice(low, low + step)
        target.index_copy_(0, target_rows[part], source.index_select(0, source_rows[part]).to(target.dtype))

"""The memory behind the pages of a pool: rows that are allocated and released in parts.

On a CPU under Linux the address range of all rows is reserved at once, and the system provides memory when a row is
first written; `drop` gives the memory of some rows back. Nothing moves. Elsewhere rows are an ordinary tensor, which is
copied into a larger or a smaller one.
"""

from __future__ import annotations

import mmap
import os
import sys

import torch
from torch import Tensor

HUGE = 2**21  # bytes: reservations with larger parts ask for pages of this size, which are faster to read
_RESERVE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)


class Rows:
    """Rows [N, width] of one dtype; `data` is replaced where rows are copied."""

    moves = True  # whether another size is a copy

    def __init__(self, width: int, dtype: torch.dtype, device: torch.device) -> None:
        with torch.inference_mode(False):  # later steps may run outside of it and write here
            self.data = torch.empty(0, width, dtype=dtype, device=device)

    def resized(self, rows: int) -> Tensor:
        """A buffer of that many rows, with a copy of the first ones, to become `data`."""
        with torch.inference_mode(False):
            data = self.data.new_empty(rows, self.data.shape[1])
            kept = min(rows, len(self.data))
            data[:kept].copy_(self.data[:kept])
        return data

    def drop(self, first: int, end: int) -> None:
        """Give back the memory of rows first to end - 1, whose contents are undefined afterwards."""


class ReservedRows(Rows):
    """Rows in a reserved address range; OSError where the system reserves none."""

    moves = False

    def __init__(self, rows: int, width: int, dtype: torch.dtype, part: int) -> None:
        """part: the bytes that are usually dropped together."""
        count = rows * width
        self._memory = mmap.mmap(-1, max(1, count * dtype.itemsize), flags=_RESERVE)
        if part >= HUGE and hasattr(mmap, "MADV_HUGEPAGE"):
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        with torch.inference_mode(False):
            self.data = torch.frombuffer(self._memory, dtype=dtype, count=count).view(rows, width)

    def resized(self, rows: int) -> Tensor:
        """Reserved once and for all."""
        raise NotImplementedError

    def drop(self, first: int, end: int) -> None:
        """See `Rows.drop`; the system's pages at both ends, which hold other rows too, stay."""
        row, size = self.data.shape[1] * self.data.element_size(), mmap.PAGESIZE
        low, high = -(-first * row // size) * size, end * row // size * size
        if high > low:
            self._memory.madvise(mmap.MADV_DONTNEED, low, high - low)


def make_rows(device: torch.device, dtype: torch.dtype, width: int, rows: int, part: int) -> Rows:
    """Reserve up to `rows` rows where possible, else none yet. part: rows that are usually dropped together."""
    if device.type == "cpu" and sys.platform == "linux":
        try:
            return ReservedRows(rows, width, dtype, part * width * dtype.itemsize)
        except (OSError, ValueError):  # e.g. `ulimit -v`
            pass
    return Rows(width, dtype, device)


def physical_bytes() -> int:
    """The memory of this machine; 1 TiB where the system does not say."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return 2**40

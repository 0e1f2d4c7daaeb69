"""Pages of one kind: which are free, how many owners each has, and their memory.

Pages are numbered; page p is rows p * T ... p * T + T - 1 of `keys` and `values`. Memory is taken and given back in
slabs of neighbouring pages.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from typing import Protocol

import torch
from torch import Tensor

from foveakv.errors import PoolFullError
from foveakv.memory.rows_of_pages import Rows, make_rows, physical_bytes

SLAB = 64  # pages
LEAST_SLABS = 32  # a limited pool has smaller slabs rather than fewer
WAYS_OUT = "drop other caches of this pool, lower the budget, or make the pool larger"
_ABSENT = -1  # in `owners`: a page without memory


class _Pool(Protocol):
    limit: int | None
    page_size: int
    lock: threading.Lock

    def collect(self) -> None: ...
    def make_room(self, nbytes: int, but: PageSpace | None = None) -> bool: ...
    def left(self) -> int | None: ...
    def full(self) -> str: ...
    def change_side(self, by: int) -> None: ...
    def give_back(self, space: PageSpace, pages: Tensor, side: int) -> None: ...


def in_words(nbytes: int) -> str:
    """Bytes as text, such as "1.5 MiB"."""
    value, units = float(nbytes), ["bytes", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value, units = value / 1024, units[1:]
    return f"{value:.4g} {units[0]}"


class PageSpace:
    """Pages of T rows of keys [N, K] and values [N, V], in one dtype on one device."""

    def __init__(self, pool: _Pool, device: torch.device, dtype: torch.dtype, key_width: int, value_width: int) -> None:
        self._pool = weakref.ref(pool)  # which holds its spaces; its caches hold both
        self.size = pool.page_size  # T
        self.page_nbytes = self.size * (key_width + value_width) * dtype.itemsize
        most = (physical_bytes() if pool.limit is None else pool.limit) // self.page_nbytes
        self.slab = max(1, min(SLAB, most // LEAST_SLABS))  # pages
        self._most = most // self.slab  # slabs
        rows = self._most * self.slab * self.size
        self._parts = [
            make_rows(device, dtype, width, rows, self.slab * self.size) for width in (key_width, value_width)
        ]
        self.moves = any(part.moves for part in self._parts)  # whether `keys` and `values` are copied to change in size
        if self.moves:
            self._parts = [Rows(width, dtype, device) for width in (key_width, value_width)]
        self.used = 0  # pages with an owner
        self._held = 0  # slabs with memory
        self._name(torch.empty(0, dtype=torch.int32))

    def _name(self, owners: Tensor) -> None:
        """Have as many pages as there are owners, int32; -1: a page without memory."""
        self.owners = owners
        with torch.inference_mode(False):  # views of the memory that is or was in use: N rows
            self.keys, self.values = (part.data[: len(owners) * self.size] for part in self._parts)

    @property
    def pool(self) -> _Pool:
        """The pool. ReferenceError: it no longer exists."""
        pool = self._pool()
        if pool is None:
            raise ReferenceError("the pool of these pages no longer exists; keep it as long as they are used")
        return pool

    @property
    def free(self) -> int:
        """Pages with memory and without an owner."""
        return self._held * self.slab - self.used

    @property
    def held_nbytes(self) -> int:
        """Bytes of all pages with memory."""
        return self._held * self.slab * self.page_nbytes

    # ---- pages

    def take(self, count: int) -> Tensor:
        """Pages for a new owner, int64 [count] on the CPU: neighbours in ascending order where there are any.

        PoolFullError: there are not enough; nothing has changed then.
        """
        if count == 0:
            return torch.empty(0, dtype=torch.int64)
        with self.pool.lock:
            self.pool.collect()
            if count > self.free:
                self._grow(count)
            free = (self.owners == 0).nonzero()[:, 0]
            first = 0
            if count > 1:  # neighbours are read faster than pages here and there
                together = (free[count - 1 :] - free[: len(free) - count + 1] == count - 1).nonzero()
                first = int(together[0]) if len(together) else 0
            pages = free[first : first + count].clone()
            self.owners[pages] = 1
            self.used += count
        return pages

    def share(self, pages: Tensor) -> None:
        """Count one more owner for every entry of pages, int64 [n]; a page may be named several times."""
        with self.pool.lock:
            self.owners.index_add_(0, pages, torch.ones(len(pages), dtype=torch.int32))

    def release(self, pages: Tensor) -> None:
        """Count one owner less for every entry of pages, int64 [n]."""
        with self.pool.lock:
            self.pool.collect()
            self.book_release(pages)

    def book_release(self, pages: Tensor) -> None:
        """As `release`, while the lock is held."""
        if len(pages) == 0:
            return
        self.owners.index_add_(0, pages, torch.full((len(pages),), -1, dtype=torch.int32))
        gone = pages[self.owners[pages] == 0].unique()
        self.used -= len(gone)
        if len(gone) and self.free >= self.slab:
            self.shrink(spare=1 if self.used else 0)

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Copy pages source [n] to pages target [n]."""
        for rows in (self.keys, self.values):
            pages = rows.view(-1, self.size * rows.shape[1])
            source, target = source.to(pages.device), target.to(pages.device)
            pages.index_copy_(0, target, pages.index_select(0, source))

    # ---- memory; the lock is held

    def _grow(self, count: int) -> None:
        """Take slabs until `count` pages are free."""
        slabs = -(-(count - self.free) // self.slab)
        absent = self._absent()
        beyond = self._most - len(self.owners) // self.slab
        if self.moves and slabs <= (eager := min(beyond, self._held // 2)) and self._room(eager):
            slabs = eager  # so that copies stay rare
        if slabs > len(absent) + beyond or not self._room(slabs):
            raise PoolFullError(self._complaint(count, len(absent) + beyond))
        if slabs > len(absent):
            self._resize(len(self.owners) // self.slab + slabs - len(absent))
            absent = self._absent()
        self.owners.view(-1, self.slab)[absent[:slabs]] = 0
        self._held += slabs

    def _absent(self) -> Tensor:
        return (self.owners.view(-1, self.slab)[:, 0] == _ABSENT).nonzero()[:, 0]

    def _room(self, slabs: int) -> bool:
        return self.pool.make_room(slabs * self.slab * self.page_nbytes, self)

    def _resize(self, slabs: int) -> None:
        pages = slabs * self.slab
        made = [part.resized(pages * self.size) for part in self._parts] if self.moves else []
        with torch.inference_mode(False):  # later steps may run outside of it and write here
            owners = torch.full((pages,), _ABSENT, dtype=torch.int32)
            kept = min(pages, len(self.owners))
            owners[:kept] = self.owners[:kept]
        for part, data in zip(self._parts, made, strict=False):  # from here on nothing can fail
            part.data = data
        self._name(owners)

    def shrink(self, spare: int) -> None:
        """Give back the memory of slabs without a page in use, except `spare` of them."""
        slabs = self.owners.view(-1, self.slab)
        if self.moves:  # only the end of a tensor can be given back, by a copy of the rest
            busy = (slabs > 0).any(1).nonzero()
            last = int(busy[-1]) + 1 + spare if len(busy) else 0
            if last <= len(slabs) // 2:
                with contextlib.suppress(torch.OutOfMemoryError):  # no room for the copy now: at a later release
                    self._resize(last)
                    self._held = last
            return
        empty = (slabs == 0).all(1).nonzero()[:, 0][spare:]
        for slab in empty.tolist():
            rows = slab * self.slab * self.size, (slab + 1) * self.slab * self.size
            for part in self._parts:
                part.drop(*rows)
        slabs[empty] = _ABSENT
        self._held -= len(empty)

    def _complaint(self, count: int, slabs: int) -> str:
        left = self.pool.left()
        more = slabs if left is None else min(slabs, max(0, left) // (self.slab * self.page_nbytes))
        fit = self.free + more * self.slab
        full = self.pool.full() if self.pool.limit is not None else "the memory of this machine is full"
        return (
            f"{full}: {count} pages of {self.size} slots of one KV head are needed "
            f"({in_words(count * self.page_nbytes)}), and {fit} would fit "
            f"({in_words(fit * self.page_nbytes)}); {WAYS_OUT}"
        )

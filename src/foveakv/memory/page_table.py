"""The pages of the runs of one layer: which page holds which slots, and which pages are shared with other caches.

Whatever needs pages takes them first and changes the table afterwards, so that a full pool changes nothing.

Notation: see `runs.py`. T slots are a page, K is the width of the table.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from foveakv.memory.page_space import PageSpace
from foveakv.memory.rows import copy_rows


class _Held:
    """What an owner holds in a pool; a finalizer gives it back, so it must not refer to its owner."""

    def __init__(self, space: PageSpace, pages: Tensor) -> None:
        self.space, self.pages, self.side = space, pages, 0

    def give_back(self) -> None:
        with contextlib.suppress(ReferenceError):  # without its pool the memory goes with the space
            self.space.pool.give_back(self.space, self.pages, self.side)


class _Contents(NamedTuple):
    """What a table holds, see `PageTable`; pages: int64 [n], all that it names."""

    host: Tensor
    on_device: Tensor
    counts: Tensor
    most: int
    total: int
    pages: Tensor


def _pages(host: Tensor) -> Tensor:
    return host[host >= 0].to(torch.int64)


@contextlib.contextmanager
def _unless_named(space: PageSpace, pages: Tensor) -> Iterator[None]:
    """Give back pages that were taken or shared for a table where what follows fails before the table names them."""
    try:
        yield
    except BaseException:
        space.release(pages)
        raise


class PageTable:
    """Pages of R runs in a space.

    host: int32 [R, K] on the CPU, -1 beyond a run's pages; on_device: the same on the device. count: int64 [R], pages
    of every run. Tensors are replaced, never changed in place.
    """

    def __init__(self, space: PageSpace, host: Tensor, count: Tensor, device: torch.device) -> None:
        """The table becomes an owner of the pages, which have been taken or shared for it."""
        self.space, self.size, self.device = space, space.size, device
        self.shared = False  # whether another table may have the same pages
        contents = self._contents(host, count)
        self._held = _Held(space, contents.pages)
        self._become(contents)
        weakref.finalize(self, self._held.give_back).atexit = False

    @classmethod
    def empty(cls, space: PageSpace, runs: int, device: torch.device) -> PageTable:
        """No pages."""
        return cls(space, torch.empty(runs, 0, dtype=torch.int32), torch.zeros(runs, dtype=torch.int64), device)

    def _contents(self, host: Tensor, count: Tensor) -> _Contents:
        on_device = host.to(self.device, non_blocking=True)
        return _Contents(host, on_device, count, int(count.max()), int(count.sum()), _pages(host))

    def _become(self, contents: _Contents) -> None:
        """Change the table, which cannot fail. The caller releases the pages that it no longer names."""
        self.host, self.on_device, self.count, self.most, self.total, self._held.pages = contents
        self._first: Tensor | None = None

    @property
    def first_rows(self) -> Tensor:
        """The first row of every page, int64 [R, K] on the device; negative beyond a run's pages."""
        if self._first is None:
            self._first = self.on_device.to(torch.int64).mul_(self.size)
        return self._first

    # ---- bytes

    @property
    def nbytes(self) -> int:
        """Bytes of all pages, shared ones included."""
        return self.total * self.space.page_nbytes

    @property
    def side_nbytes(self) -> int:
        """Bytes of the table."""
        return self.host.untyped_storage().nbytes() * (1 if self.device.type == "cpu" else 2)

    @property
    def charged(self) -> int:
        """Bytes of side data that count in the pool."""
        return self._held.side

    def charge(self, nbytes: int) -> None:
        """Count nbytes of side data in the pool, instead of what was counted before. PoolFullError: no room."""
        self.space.pool.change_side(nbytes - self._held.side)
        self._held.side = nbytes

    # ---- pages

    def need(self, lengths: Tensor) -> Tensor:
        """Pages that runs of lengths [R] fill."""
        return (lengths + (self.size - 1)) // self.size

    def prepare(self, lengths: Tensor, run: Tensor | None = None, column: Tensor | None = None) -> None:
        """Make room for lengths [R], and pages (run [n], column [n]) the table's own, so that they may be written.

        All int64 on the CPU; columns may lie beyond a run's pages and may repeat. PoolFullError: nothing has changed.
        """
        count = torch.maximum(self.need(lengths), self.count)
        extra = int((count - self.count).sum())
        copied = self._to_copy(run, column) if self.shared and run is not None and column is not None else None
        if extra == 0 and copied is None:
            return
        copies = 0 if copied is None else copied.shape[1]
        taken, released = self.space.take(extra + copies), None
        with _unless_named(self.space, taken):
            host = self._widened(int(count.max()))
            if copied is not None:
                place = copied[0], copied[1]
                released = host[place].to(torch.int64)
                self.space.copy(released, taken[extra:])
                host[place] = taken[extra:].to(torch.int32)
            new = torch.arange(host.shape[1])
            new = (new >= self.count[:, None]) & (new < count[:, None])
            host[new] = taken[:extra].to(torch.int32)
            contents = self._contents(host, count)
        self._become(contents)
        if released is not None:
            self.space.release(released)

    def _widened(self, columns: int) -> Tensor:
        """A copy of the table with `columns` columns or more."""
        if columns <= self.host.shape[1]:
            return self.host.clone()
        width = max(columns, self.host.shape[1] + self.host.shape[1] // 2)
        host = torch.full((len(self.host), width), -1, dtype=torch.int32)
        host[:, : self.host.shape[1]] = self.host
        return host

    def _to_copy(self, run: Tensor, column: Tensor) -> Tensor | None:
        """int64 [2, n], those of the named pages that have other owners."""
        within = column < self.count[run]
        named = torch.stack([run[within], column[within]]).unique(dim=1)
        owners = self.space.owners
        others = owners[self.host[named[0], named[1]].to(torch.int64)] > 1
        if not bool(others.any()):
            self.shared = bool((owners[self._held.pages] > 1).any())
            return None
        return named[:, others]

    def trim(self, lengths: Tensor, spare: int = 0) -> None:
        """Give back pages that runs of lengths [R] do not need, all but `spare` of each."""
        count = torch.minimum(self.count, self.need(lengths) + spare)
        if torch.equal(count, self.count):
            return
        column = torch.arange(self.host.shape[1])
        gone = (column >= count[:, None]) & (self.host >= 0)
        released = self.host[gone].to(torch.int64)
        self._become(self._contents(self.host.masked_fill(gone, -1), count))
        self.space.release(released)

    def select(self, former: Tensor) -> _Change:
        """To carry out: run i becomes the former run former[i], int64 [R'], with the same pages."""
        host = self.host[former]
        self.space.share(pages := _pages(host))
        self.shared = True
        with _unless_named(self.space, pages):
            return _Change(self, self._contents(host, self.count[former]), pages, self._held.pages)

    def fork(self) -> PageTable:
        """A table that shares all pages."""
        self.space.share(pages := self._held.pages)
        self.shared = True
        with _unless_named(self.space, pages):
            other = PageTable(self.space, self.host, self.count, self.device)
        other.shared = True
        return other

    # ---- rows

    def rows(self, run: Tensor, slot: Tensor) -> Tensor:
        """Rows of keys and values, int64 [n], of slots [n] of runs [n]."""
        first, bits = self.first_rows, self.size.bit_length() - 1  # a power of two: shifts are faster than divisions
        return first.view(-1).index_select(0, (slot >> bits).add_(run, alpha=first.shape[1])).add_(slot & self.size - 1)

    def close_up(self, run: Tensor, slot: Tensor, lengths: Tensor) -> _Closing:
        """What to do so that slots (run [n], slot [n]), in order of runs and slots, become runs of lengths [R].

        PoolFullError: nothing has changed.
        """
        counts = lengths.to(run.device)
        target = torch.arange(len(run), device=run.device) - (counts.cumsum(0) - counts)[run]
        moved = (slot != target).nonzero()[:, 0]
        if not self.shared or len(moved) == 0:
            return _Closing(self, lengths, self.rows(run[moved], slot[moved]), self.rows(run[moved], target[moved]))
        # New pages from the first one on that changes: others may still read the old ones.
        count = self.need(lengths)
        first = (count * self.size).scatter_reduce_(0, run[moved].cpu(), target[moved].cpu(), "amin") // self.size
        column = torch.arange(self.host.shape[1])
        fresh = (column >= first[:, None]) & (column < count[:, None])
        taken = self.space.take(int(fresh.sum()))
        with _unless_named(self.space, taken):
            host, released = self.host.clone(), self.host[fresh].to(torch.int64)
            host[fresh] = taken.to(torch.int32)
            again = (target // self.size >= first.to(run.device)[run]).nonzero()[:, 0]
            place = run[again].cpu(), (target[again] // self.size).cpu()
            rows = host[place].to(run.device, torch.int64) * self.size + target[again] % self.size
            for buffer in (self.space.keys, self.space.values):
                copy_rows(buffer, buffer, rows, self.rows(run[again], slot[again]))
            change = _Change(self, self._contents(host, self.count), taken, released)
        return _Closing(self, lengths, change=change)


class _Change:
    """What a table will be: prepared, so that nothing can fail any more."""

    def __init__(self, table: PageTable, contents: _Contents, taken: Tensor, released: Tensor) -> None:
        """taken, released: pages int64 [n] that the table will name, or will no longer name."""
        self.table, self.contents, self.taken, self.released = table, contents, taken, released

    def carry_out(self) -> None:
        self.table._become(self.contents)
        self.table.space.release(self.released)

    def undo(self) -> None:
        """Give back the pages that were taken or shared for it."""
        self.table.space.release(self.taken)


class _Closing:
    """Slots that move to the front of their runs: no page has to be taken any more.

    Rows source [m] move to rows target [m] in the table's own pages; with new pages they are there already.
    """

    def __init__(
        self, table: PageTable, lengths: Tensor, source: Tensor | None = None, target: Tensor | None = None,
        change: _Change | None = None,
    ) -> None:  # fmt: skip
        self.table, self.lengths, self.source, self.target, self.change = table, lengths, source, target, change

    def carry_out(self) -> None:
        """Move the rows and give back the pages at the ends."""
        if self.change is not None:
            self.change.carry_out()
        if self.source is not None and self.target is not None:
            for buffer in (self.table.space.keys, self.table.space.values):
                copy_rows(buffer, buffer, self.target, self.source)
        self.table.trim(self.lengths)

    def undo(self) -> None:
        """Give back the pages that were taken for it."""
        if self.change is not None:
            self.change.undo()

"""Stored keys and values of one layer in pages of a pool, with the interface of `Segments`.

Keys and values of a run are in pages that a table names; positions and side fields are contiguous beside them, since
some methods write them at every step, and pages that caches share must not be copied for that. Both count in the pool.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from foveakv.memory.page_table import PageTable
from foveakv.memory.pool import Pool
from foveakv.memory.quantizer import Quantizer
from foveakv.memory.rows import copy_rows
from foveakv.memory.runs import Runs, padded_rows
from foveakv.memory.segments import Segments


class PagedSegments(Segments):
    """The KV slots of one layer in pages of a pool.

    `copy.deepcopy` makes a fork: it shares all pages, and whoever writes to a shared page first copies it. Where memory
    must be taken, `PoolFullError` says that the pool has too little; what is stored has not changed by the call then.
    """

    table: PageTable

    def __init__(
        self,
        batch: int,
        heads: int,
        keys: Tensor,
        values: Tensor,
        quantizer: Quantizer | None = None,
        residual_length: int = 0,
        *,
        pool: Pool,
    ) -> None:
        """Make an empty memory; see `Segments`."""
        self.pool = pool
        self._next: Tensor | None = None  # int64 [R] rows of the next slots
        self._ahead = 0  # how many slots of every run can be written at `_next` and after it
        self._back = 0  # how many slots before `_next` are in the same page, in every run
        super().__init__(batch, heads, keys, values, quantizer, residual_length)
        pool.join(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> PagedSegments:
        self._give_back_reserve()  # it is not shared
        forked = memo[id(self)] = object.__new__(type(self))
        forked.__dict__.update(self.__dict__)
        forked.table = self.table.fork()
        forked.table.charge(self.table.charged)
        self._lose_place()
        forked._lose_place()
        forked._runs = None
        forked._layout = copy.copy(self._layout)  # its tensors are never changed in place
        forked._quantized = copy.deepcopy(self._quantized, memo)
        with torch.inference_mode(False):
            forked._positions = self._positions.clone()
            forked._fields = {name: field.clone() for name, field in self._fields.items()}
        forked._fills = dict(self._fills)
        forked._refresh_views()
        self.pool.join(forked)
        return forked

    # -- what is stored ----------------------------------------------------------------------------------------------

    @property
    def _keys(self) -> Tensor:  # type: ignore[override]
        return self.table.space.keys

    @property
    def _values(self) -> Tensor:  # type: ignore[override]
        return self.table.space.values

    @property
    def runs(self) -> Runs:
        """See `ReadableSlots.runs`: with a page table."""
        runs, table = self._runs, self.table
        if runs is None or runs.table_host is not table.host or runs.keys is not table.space.keys:
            self._runs = None
            runs = super().runs
            runs.table, runs.table_host, runs.page_size = table.on_device, table.host, table.size
        return runs

    @property
    def pages(self) -> int:
        """Pages of all runs, shared ones included."""
        return self.table.total

    @property
    def side_nbytes(self) -> int:
        """Bytes held by everything else: positions, starts, lengths, fields, scales, the page table."""
        return super().side_nbytes + self.table.side_nbytes

    @property
    def held_nbytes(self) -> int:
        """See `ReadableSlots.held_nbytes`."""
        return self._held + self.table.nbytes + self.table.side_nbytes

    @property
    def _rows_nbytes(self) -> int:
        return self.table.nbytes

    @property
    def _capacity(self) -> int:
        return self.table.total * self.table.size

    def _buffers(self) -> list[Tensor]:
        return [self._positions, *self._fields.values()]

    def _padded_rows(self) -> tuple[Tensor, Tensor]:
        rows, stored = padded_rows(self.runs)
        shape, beyond = (self.batch, self.heads, self.max_length, -1), ~stored.view(-1)
        padded = []
        for buffer in (self._keys, self._values):
            found = buffer.index_select(0, rows.view(-1))
            found[beyond] = 0
            padded.append(found.view(*shape[:3], buffer.shape[1]))
        return padded[0], padded[1]

    # -- pages -------------------------------------------------------------------------------------------------------

    def _make_rows(self, dtype: torch.dtype, key_width: int, value_width: int) -> None:
        space = self.pool.space(self._device, dtype, key_width, value_width)
        self.table = PageTable.empty(space, self._layout.batch * self._layout.heads, self._device)

    def _allocate_rows(self, rows: int) -> None:
        """Nothing: pages are taken by `_reserve`."""

    def _charge(self, rows: int, more: int = 0, runs: int | None = None) -> None:
        """Count positions, fields (and `more` bytes per row), scales and full-precision copies in the pool.

        runs: R after the change; None: as now.
        """
        row = more + sum(buffer.element_size() for buffer in self._buffers())
        each = 0 if self._quantized is None else self._quantized.nbytes
        if runs is not None:
            each = each // len(self.table.host) * runs
        self.table.charge(rows * row + each)

    def _reserve(self, lengths: Tensor, written: Tensor | None = None) -> None:
        self._lose_place()
        run = column = None
        if written is not None and self.table.shared:
            first = written // self.table.size
            end = torch.minimum(self.table.need(lengths), self.table.count).where(lengths > written, first)
            column = first[:, None] + torch.arange(int((end - first).max().clamp_(min=0)))
            run, column = (column < end[:, None]).nonzero()[:, 0], column[column < end[:, None]]
        self.table.prepare(lengths, run, column)

    def _make_room(self, q: int) -> None:
        layout = self._layout
        if q > self._ahead:
            self._reserve(layout.length + q, layout.length)
        super()._make_room(q)

    def _at(self, rows: Tensor) -> Tensor:
        run, slot = self._places(rows)
        return self.table.rows(run, slot)

    def _places(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Runs and slots of rows of the layout."""
        run = torch.searchsorted(self._layout.start_dev, rows, right=True) - 1
        return run, rows - self._layout.start_dev[run]

    def _to_write(self, rows: Tensor) -> Tensor:
        run, slot = self._places(rows)
        if self.table.shared:
            self._lose_place()
            self.table.prepare(self._layout.length, run.cpu(), (slot // self.table.size).cpu())
        return self.table.rows(run, slot)

    def _take(self, buffer: Tensor, source: Tensor, rows: Tensor, source_rows: Tensor) -> None:
        copy_rows(buffer, source, rows, source_rows)

    # -- operations --------------------------------------------------------------------------------------------------

    def _append_rows(self, keys: Tensor, values: Tensor, rows: Tensor | None) -> None:
        q = keys.shape[2]
        if q == 0:
            return
        if self._next is None or q > self._ahead:
            rows = self._open(q)
        elif q == 1:
            rows = self._next
        else:
            rows = (self._next[:, None] + torch.arange(q, device=self._device)).view(-1)
        if self._ahead >= q and self._next is not None:
            self._next, self._ahead, self._back = self._next + q, self._ahead - q, self._back + q
        space = self.table.space
        for buffer, new in ((space.keys, keys), (space.values, values)):
            flat = new.reshape(-1, new.shape[-1])
            buffer.index_copy_(0, rows, flat if flat.dtype == buffer.dtype else flat.to(buffer.dtype))

    def _lose_place(self) -> None:
        """What is known of `_next` no longer holds."""
        self._ahead = self._back = 0

    def _give_back_reserve(self, spare: int = 0) -> None:
        """Give back pages without slots, all but `spare` of each run: `_next` may be in one of them."""
        self._lose_place()
        self.table.trim(self._layout.length, spare)

    def _open(self, q: int) -> Tensor:
        """Rows of q new slots, int64 [R * q], where some of them begin a page; `_next` is then where q more are."""
        layout, size = self._layout, self.table.size
        run = torch.arange(layout.length.shape[0], device=self._device)[:, None]
        slot = layout.length_dev[:, None] + torch.arange(q, device=self._device)
        rows = self.table.rows(run.expand_as(slot).reshape(-1), slot.view(-1)).view(-1, q)
        last = (layout.length + (q - 1)) % size  # the place in its page of the last of them
        self._ahead, self._back = q + int(size - 1 - last.max()), 1 - q + int(last.min())
        self._next = rows[:, -1] + (1 - q)
        return rows.reshape(-1)

    def _set_lengths(self, lengths: Tensor) -> None:
        super()._set_lengths(lengths)
        self._lose_place()

    def evict(self, slots: Tensor | int, counts: list[int]) -> None:
        """See `Segments.evict`. Each run keeps a free page in reserve, for methods that add and evict in turn."""
        count, following, ahead, back = max(counts, default=0), self._next, self._ahead, self._back
        steady = count == min(counts, default=0) and count <= back and not self.table.shared
        super().evict(slots, counts)
        self._lose_place()
        if steady and following is not None:  # the next slots are in the same pages as before
            self._next, self._ahead, self._back = following - count, ahead + count, back - count
        elif not self._layout.uniform or self.table.most > 1 + -(-self.max_length // self.table.size):
            self._give_back_reserve(spare=1)

    def _move_one(self, target: int, source: int) -> None:
        table, size = self.table, self.table.size
        if table.shared:
            run = torch.arange(len(table.host))
            table.prepare(self._layout.length, run, torch.full_like(run, target // size))
        first = table.first_rows
        rows, from_rows = first[:, target // size] + target % size, first[:, source // size] + source % size
        for buffer in (table.space.keys, table.space.values):
            buffer.index_copy_(0, rows, buffer.index_select(0, from_rows))
        super()._move_one(target, source)

    def _move(self, target: Tensor, source: Tensor) -> None:
        some = (self._layout.length > 0).nonzero()[:, 0].to(self._device)  # others have no page, and nothing to move
        start = self._layout.start_dev[some, None]
        slots, sources = (rows.view(self.table.host.shape[0], -1)[some] - start for rows in (target, source))
        run = some[:, None].expand_as(slots).reshape(-1)
        self._move_rows(run, slots.view(-1), sources.view(-1))
        super()._move(target, source)

    def _reorder(self, run: Tensor, target: Tensor, source: Tensor) -> None:
        self._move_rows(run, target, source)
        super()._reorder(run, target, source)

    def _move_rows(self, run: Tensor, target: Tensor, source: Tensor) -> None:
        """Copy slots source [n] of runs [n] onto slots target [n]."""
        if self.table.shared:
            self.table.prepare(self._layout.length, run.cpu(), (target // self.table.size).cpu())
        rows, from_rows = self.table.rows(run, target), self.table.rows(run, source)
        for buffer in (self._keys, self._values):
            buffer.index_copy_(0, rows, buffer.index_select(0, from_rows))

    def _close_up(self, run: Tensor, slot: Tensor, counts: Tensor) -> None:
        closing = self.table.close_up(run, slot, counts)
        try:
            super()._close_up(run, slot, counts)
        except BaseException:
            closing.undo()
            raise
        closing.carry_out()
        self._lose_place()

    def select_sequences(self, index: Tensor) -> None:
        """Sequence i becomes the former sequence index[i]; pages are shared, not copied."""
        index = index.to("cpu", torch.int64)
        if index.tolist() == list(range(self.batch)):
            return
        if index.dim() != 1 or len(index) == 0 or bool(((index < 0) | (index >= self.batch)).any()):
            super().select_sequences(index)  # refuses it
        former = (index[:, None] * self.heads + torch.arange(self.heads)).view(-1)
        self._give_back_reserve()  # it is not shared
        change = self.table.select(former)
        try:
            self._charge(self._layout.rows_for(self._layout.length[former]), runs=len(former))
            super().select_sequences(index)
        except BaseException:
            change.undo()
            raise
        change.carry_out()

"""The buffers of one layer: made, enlarged and replaced by smaller ones.

`Segments` has rows of keys and values beside positions and fields, in the order of one layout. Memory that has its keys
and values elsewhere (`PagedSegments`) overrides the methods about rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from foveakv.memory.rows import flat, take
from foveakv.memory.stored import ReadableSlots


class GrowingSlots(ReadableSlots):
    """Keys, values, positions and side fields of one layer, with room to grow."""

    _device: torch.device

    # -- rows of keys and values, for memory that has them elsewhere ---------------------------------------------------

    def _make_rows(self, dtype: torch.dtype, key_width: int, value_width: int) -> None:
        """Empty keys [0, key_width] and values [0, value_width]."""
        with torch.inference_mode(False):
            self._keys = torch.empty(0, key_width, dtype=dtype, device=self._device)
            self._values = torch.empty(0, value_width, dtype=dtype, device=self._device)

    def _reserve(self, lengths: Tensor, written: Tensor | None = None) -> None:
        """Make room for lengths [R] on the CPU; slots from written [R] on will be written. Here `_allocate` does."""

    def _make_room(self, q: int) -> None:
        """Make room for q more slots of every run."""
        if q > self._layout.spare:
            self._rebuild(self._layout.length, self._layout.length + q)

    def _at(self, rows: Tensor) -> Tensor:
        """Where keys and values of rows of the layout are, int64 [n]."""
        return rows

    def _to_write(self, rows: Tensor) -> Tensor:
        """As `_at`, for rows that will be written."""
        return rows

    def _take(self, buffer: Tensor, source: Tensor, rows: Tensor, source_rows: Tensor) -> None:
        """buffer[rows] = source[source_rows]; all else in the buffer is slack."""
        if source.dtype == buffer.dtype:
            take(buffer, source, rows, source_rows)
        else:
            buffer.index_copy_(0, rows, source.index_select(0, source_rows).to(buffer.dtype))

    # -- inside ------------------------------------------------------------------------------------------------------

    def _set_lengths(self, lengths: Tensor) -> None:
        self._layout.set_lengths(lengths)
        self._runs = None

    def _grow(self, by: int) -> None:
        self._layout.grow(by)
        self._runs = None

    def _allocate(self, lengths: Tensor) -> None:
        """Fresh, uninitialised buffers with room for lengths [R] and the usual slack; `_set_lengths` must follow."""
        self._charge(self._layout.rows_for(lengths))
        self._layout.allocate(lengths)
        rows = self._layout.rows
        self._allocate_rows(rows)
        # Normal tensors even under inference_mode: later steps may run outside of it and write here.
        with torch.inference_mode(False):
            self._positions = self._positions.new_empty(rows)
            self._fields = {name: buffer.new_empty(rows) for name, buffer in self._fields.items()}
        self._held = sum(buffer.untyped_storage().nbytes() for buffer in self._buffers())
        self._held += 0 if self._quantized is None else self._quantized.nbytes
        self._refresh_views()

    def _allocate_rows(self, rows: int) -> None:
        with torch.inference_mode(False):
            self._keys = self._keys.new_empty(rows, self._keys.shape[1])
            self._values = self._values.new_empty(rows, self._values.shape[1])

    def _rebuild(self, carried: Tensor, lengths: Tensor, source: Tensor | None = None) -> None:
        """Move into fresh buffers that have room for lengths [R].

        The old rows `source` (in run order; by default all stored rows) become the first carried[r] slots of run r.
        """
        total = int(carried.sum())
        if source is None:
            source = self._layout.stored_rows()
        before = self._buffers()
        self._allocate(lengths)
        target = flat(self._layout.start_dev, carried.to(self._device), total)
        for old, new in zip(before, self._buffers(), strict=True):
            take(new, old, target, source)
        self._set_lengths(carried)

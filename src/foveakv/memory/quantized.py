"""Quantized keys and values of one layer: what `Segments` does differently when its rows are bytes.

The newest tokens of every run also have full-precision copies in a residual window. The side field RESIDUAL holds, for
every slot, its entry in the window or -1; like every field it follows its slot.
"""

from __future__ import annotations

import torch
from torch import Tensor

from foveakv.memory.layout import Layout
from foveakv.memory.quantizer import Quantizer
from foveakv.memory.residual import Residual, ResidualWindow

RESIDUAL = "residual"


class QuantizedRows:
    """The quantizer of a layer and its residual window, which is None with a length of 0."""

    def __init__(self, batch: int, heads: int, quantizer: Quantizer, keys: Tensor, values: Tensor, length: int) -> None:
        """For rows like keys [..., D] and values [..., Dv] as the model computes them."""
        self.quantizer = quantizer
        self.window = ResidualWindow(batch, heads, length, keys, values) if length else None
        self.dtype = keys.dtype

    # -- bytes -------------------------------------------------------------------------------------------------------

    @property
    def window_nbytes(self) -> int:
        """Bytes of the full-precision copies."""
        return 0 if self.window is None else self.window.nbytes

    @property
    def nbytes(self) -> int:
        """Bytes of the copies and of the keys' scales and zeros."""
        return self.window_nbytes + self.quantizer.nbytes

    def plain_nbytes(self, rows: int) -> int:
        """Bytes that `rows` slots would take as the model computes them."""
        return rows * (self.quantizer.dim + self.quantizer.value_dim) * self.dtype.itemsize

    # -- reading -----------------------------------------------------------------------------------------------------

    def residual(self, entries: Tensor | None) -> Residual | None:
        """What attention reads in place of quantized rows; entries int16 [N], the field RESIDUAL."""
        if self.window is None or entries is None:
            return None
        return Residual(self.window.keys, self.window.values, entries)

    def dequantized(
        self, layout: Layout, keys: Tensor, values: Tensor, entries: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Padded rows keys [B, H, M, K] and values [B, H, M, V] -> what attention reads, in the model's dtype.

        That is the full-precision copy where a slot has one, and else the dequantized row. Zeros beyond a run.
        """
        run = torch.arange(layout.batch * layout.heads, device=layout.device).view(layout.batch, layout.heads, 1)
        beyond = ~layout.valid()[..., None]
        keys, values = self.quantizer.dequantize_keys(keys, run), self.quantizer.dequantize_values(values)
        keys, values = (numbers.to(self.dtype).masked_fill_(beyond, 0) for numbers in (keys, values))
        if self.window is not None and entries is not None:
            entry = layout.padded(entries, -1).to(torch.int64)
            newest = entry >= 0
            run, entry = run.expand_as(entry)[newest], entry[newest]
            keys[newest], values[newest] = self.window.keys[run, entry], self.window.values[run, entry]
        return keys, values

    # -- writing -----------------------------------------------------------------------------------------------------

    def fill_window(
        self, layout: Layout, entries: Tensor, keys: Tensor, values: Tensor, run: Tensor, column: Tensor, row: Tensor
    ) -> None:
        """Copy the last tokens of every run of a prompt into the window, and mark their slots in entries, int16 [N].

        keys [B, H, C, D], values [B, H, C, Dv]; run, column and row, [n] each, of every stored slot.
        """
        window = self.window
        if window is None:
            return
        entry = window.length - (layout.start_dev + layout.length_dev)[run] + row  # the last slot: W - 1
        near = entry >= 0
        run, column, row, entry = (index[near] for index in (run, column, row, entry))
        place = run // layout.heads, run % layout.heads, column
        window.keys[run, entry] = keys[place].to(window.keys.dtype)
        window.values[run, entry] = values[place].to(window.values.dtype)
        entries.index_copy_(0, row, entry.to(torch.int16))

    def append(
        self, layout: Layout, keys: Tensor, values: Tensor, entries: Tensor | None, entries_view: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Quantize q new tokens of every run, keys [B, H, q, D] and values [B, H, q, Dv].

        entries: the field RESIDUAL, int16 [N]; entries_view: the same as [B, H, capacity] where runs are uniform.
        Returns the rows, and the window's entries of the last tokens, int16 [min(q, W)]; None without a window.
        """
        marks = None
        if self.window is not None and entries is not None:
            self._release(self.window, layout, keys.shape[2], entries, entries_view)
            marks = self.window.enter(keys, values)
        return self.quantizer.quantize_keys(keys), self.quantizer.quantize_values(values), marks

    def _release(
        self, window: ResidualWindow, layout: Layout, q: int, entries: Tensor, entries_view: Tensor | None
    ) -> None:
        """Take the entries that q new tokens need from the slots that have them."""
        count, length = min(q, window.length), window.length
        if window.settled < length or count == length:
            window.release(entries, count)
        elif entries_view is not None:  # no search: the slots are W from the end
            low, high = max(0, layout.max_length - length), layout.max_length - length + count
            if high > low:
                entries_view.narrow(2, low, high - low).fill_(-1)
        elif int(layout.length.min()) < length:
            window.release(entries, count)
        else:
            rows = layout.start_dev + (layout.length_dev - length)
            entries.index_fill_(0, (rows[:, None] + torch.arange(count, device=rows.device)).view(-1), -1)

    # -- moving ------------------------------------------------------------------------------------------------------

    def moved(self) -> None:
        """Slots changed places: which of them have entries is no longer known from their order."""
        if self.window is not None:
            self.window.settled = 0

    def select(self, former: Tensor, index: Tensor) -> None:
        """Run i becomes the former run former[i] and sequence i the former sequence index[i]; both int64."""
        self.quantizer = self.quantizer.select(former)
        if self.window is not None:
            self.window.select(index)

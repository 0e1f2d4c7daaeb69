"""Stored keys and values of one layer: a contiguous run of slots for every (sequence, KV head).

Notation: see `runs.py`. Slots are stored in the order in which they came, until `evict` moves some: read positions to
know the order of tokens.

With a `kv_dtype` the rows of keys and values are bytes (see `quantizer.py` and `quantized.py`). Slots are quantized
once, when they are written; moving them moves bytes.
"""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor

from foveakv.memory.growing import GrowingSlots
from foveakv.memory.layout import Layout
from foveakv.memory.quantized import RESIDUAL, QuantizedRows
from foveakv.memory.quantizer import Quantizer
from foveakv.memory.rows import flat, moves, shift


class Segments(GrowingSlots):
    """The KV slots of one layer, in flat buffers with room to grow at the end of every run.

    Lengths and layout are kept on the host, so nothing here waits for a device except `keep` and `crop`, whose masks
    decide how much memory is needed. Side fields (one value per slot) follow their slots through every operation.

    Keys and values are stored in one dtype: where those of a prompt differ (under autocast), in the wider one. What is
    added later is converted to it.
    """

    def __init__(
        self,
        batch: int,
        heads: int,
        keys: Tensor,
        values: Tensor,
        quantizer: Quantizer | None = None,
        residual_length: int = 0,
    ) -> None:
        """Make an empty memory for rows like keys [..., D] and values [..., Dv]; `from_dense` is the usual way.

        ValueError: no sequence or no KV head.
        """
        if batch < 1 or heads < 1:
            raise ValueError(f"a memory needs at least one sequence and one KV head, got {batch} and {heads}")
        self._device = keys.device
        self._quantized = None
        dtype = torch.promote_types(keys.dtype, values.dtype)
        widths = keys.shape[-1], values.shape[-1]
        if quantizer is not None:
            keys, values = (torch.empty(0, width, dtype=dtype, device=keys.device) for width in widths)
            self._quantized = QuantizedRows(batch, heads, quantizer, keys, values, residual_length)
            dtype, widths = torch.uint8, (quantizer.key_bytes, quantizer.value_bytes)
        with torch.inference_mode(False):
            self._positions = torch.empty(0, dtype=torch.int32, device=self._device)
        self._fields = {}
        self._fills = {}
        self._layout = Layout(batch, heads, self._device)
        self._make_rows(dtype, *widths)
        self._allocate(self._layout.length)
        self._set_lengths(self._layout.length)

    @classmethod
    def from_dense(
        cls,
        keys: Tensor,
        values: Tensor,
        keep: Tensor,
        positions: Tensor,
        *,
        kv_dtype: str | None = None,
        residual_length: int = 32,
        real: Tensor | None = None,
        **memory: Any,
    ) -> Self:
        """Copy the kept columns of a dense layer; the dense tensors are not referenced afterwards.

        Args:
            keys: [B, H, C, D]. values: [B, H, C, Dv]; see the class for values of another dtype.
            keep: bool [B, H, C] or [B, 1, C]. The order inside a run is the order of the columns.
            positions: int64 [B, C].
            kv_dtype: "int8" or "int4" quantizes the slots. The range of a key channel is that of all real columns, and
                not only of the kept ones.
            residual_length: with a kv_dtype, the last tokens of each run that are also stored in full precision.
            real: bool [B, C], False at padding; None: no padding.
            memory: where the slots are stored, for `PagedSegments`: pool.

        ValueError: shapes that do not fit. MethodError: a kv_dtype that is unknown or needs other head dimensions.
        """
        batch, heads, columns = keys.shape[:3]
        if values.shape[:3] != keys.shape[:3]:
            raise ValueError(f"keys {tuple(keys.shape)} and values {tuple(values.shape)} differ in [B, H, C]")
        if keep.dtype != torch.bool or keep.dim() != 3 or keep.shape[0] != batch or keep.shape[2] != columns:
            raise ValueError(f"keep must be bool [B, H, C] or [B, 1, C], got {keep.dtype} {tuple(keep.shape)}")
        if positions.shape != (batch, columns):
            raise ValueError(f"positions must be [B, C] = {(batch, columns)}, got {tuple(positions.shape)}")
        keys, values = keys.detach(), values.detach()
        quantizer = None if kv_dtype is None else Quantizer.of_prompt(kv_dtype, keys, values.shape[-1], real)
        self = cls(batch, heads, keys, values, quantizer, residual_length, **memory)
        mask = keep.to(keys.device).expand(batch, heads, columns).reshape(batch * heads, columns)
        lengths = mask.sum(-1).cpu()
        run, column = mask.nonzero(as_tuple=True)
        self._reserve(lengths)
        self._allocate(lengths)
        self._set_lengths(lengths)
        target = self._layout.stored_rows()
        rows_at = self._at(target)
        sequence, head = run // heads, run % heads
        for buffer, source in ((self._keys, keys), (self._values, values)):
            # Projections are [B, C, H, D] in memory, rotated keys often too: rows are read in place.
            if source.transpose(1, 2).is_contiguous():
                rows = source.transpose(1, 2).reshape(-1, source.shape[-1])
                index = (sequence * columns + column) * heads + head
            else:
                rows = source.reshape(-1, source.shape[-1])
                index = run * columns + column
            if quantizer is not None:
                quantizer.store(buffer, rows, rows_at, index, run if buffer is self._keys else None)
            else:
                self._take(buffer, rows, rows_at, index)
        self._positions.index_copy_(0, target, positions.to(self._device)[sequence, column].to(torch.int32))
        if self._quantized is not None and self._quantized.window is not None:
            self.add_field(RESIDUAL, dtype=torch.int16, fill=-1)
            self._quantized.fill_window(self._layout, self._fields[RESIDUAL], keys, values, run, column, target)
        return self

    # -- changing what is stored -------------------------------------------------------------------------------------

    def append(self, keys: Tensor, values: Tensor, positions: Tensor) -> None:
        """Add q slots to every run, O(q) amortised: keys [B, H, q, D], values [B, H, q, Dv], positions [B or 1, q].

        Keys and values of another dtype are converted to the stored one. ValueError: shapes.
        """
        q, layout, quantized = keys.shape[2], self._layout, self._quantized
        if keys.shape[:2] != (self.batch, self.heads) or positions.shape not in ((self.batch, q), (1, q)):
            raise ValueError(
                f"append expects keys [{self.batch}, {self.heads}, q, D] and positions [{self.batch} or 1, q], "
                f"got {tuple(keys.shape)} and {tuple(positions.shape)}"
            )
        self._make_room(q)
        if keys.requires_grad or values.requires_grad:
            keys, values = keys.detach(), values.detach()
        marks = entries = None
        if quantized is not None:
            entries = self._fields.get(RESIDUAL)
            entries_view = self._field_view(RESIDUAL) if layout.uniform and entries is not None else None
            keys, values, marks = quantized.append(layout, keys, values, entries, entries_view)
        rows = None if layout.uniform else layout.next_rows(q)
        self._append_rows(keys, values, rows)
        self._append_fields(positions, rows, q, marks)
        self._grow(q)

    def _append_rows(self, keys: Tensor, values: Tensor, rows: Tensor | None) -> None:
        """Write q new slots of every run; rows: where, int64 [R * q], None in uniform runs."""
        if rows is None:
            at, q, views = self._layout.max_length, keys.shape[2], self._views
            views[-2].narrow(2, at, q).copy_(keys)
            views[-1].narrow(2, at, q).copy_(values)
        else:
            n = rows.shape[0]
            self._keys.index_copy_(0, rows, keys.reshape(n, keys.shape[-1]).to(self._keys.dtype))
            self._values.index_copy_(0, rows, values.reshape(n, values.shape[-1]).to(self._values.dtype))

    def _append_fields(self, positions: Tensor, rows: Tensor | None, q: int, marks: Tensor | None) -> None:
        """Positions and side fields of q new slots; marks: int16 [n], the last n slots' entries in the window."""
        if rows is None:
            at, views = self._layout.max_length, self._views
            views[0].narrow(2, at, q).copy_(positions if len(positions) == 1 else positions[:, None])
            for view, fill in zip(views[1:], self._fills.values(), strict=False):
                view.narrow(2, at, q).fill_(fill)
            if marks is not None:
                self._field_view(RESIDUAL).narrow(2, at + q - len(marks), len(marks)).copy_(marks)
            return
        spread = positions[:, None].to(self._device, torch.int32).expand(self.batch, self.heads, -1)
        self._positions.index_copy_(0, rows, spread.reshape(rows.shape[0]))
        for name, buffer in self._fields.items():
            buffer.index_fill_(0, rows, self._fills[name])
        if marks is not None:
            newest = rows.view(-1, q)[:, q - len(marks) :]
            self._fields[RESIDUAL].index_copy_(0, newest.reshape(-1), marks.expand(newest.shape).reshape(-1))

    def evict(self, slots: Tensor | int, counts: list[int]) -> None:
        """Evict individual slots in O(evicted): a run's last slots move into the holes.

        Args:
            slots: int64 [B, H or 1, n], distinct in a run; a number is that one slot in every run.
            counts: [B]; sequence b loses the first counts[b] of its n entries in every head, others are ignored.

        The k-th hole before the run's new end takes the k-th of its last slots that survive; everything else stays
        where it is. Buffers are replaced by smaller ones when much is spare. ValueError: shapes, or (on the CPU, where
        it costs nothing) slots that are not stored.
        """
        layout = self._layout
        if isinstance(slots, int) and not layout.uniform:
            slots = torch.full((self.batch, 1, 1), slots)
        n = 1 if isinstance(slots, int) else slots.shape[-1]
        if len(counts) != self.batch or not all(0 <= count <= n for count in counts):
            raise ValueError(f"evict expects slots [{self.batch}, {self.heads} or 1, n] and counts of at most n")
        most, least = max(counts), min(counts)
        if most == 0:
            return
        if self._quantized is not None:
            self._quantized.moved()
        if isinstance(slots, int) and least == 0:
            slots = torch.full((self.batch, 1, 1), slots)
        if isinstance(slots, int):
            last = layout.max_length - 1
            if slots != last:
                self._move_one(slots, last)
        else:
            slots = self._checked(slots[..., :most], counts)
            if most == least == 1:
                source = layout.start_dev + (layout.length_dev - 1)
                target = (layout.start_dev.view(self.batch, self.heads) + slots[..., 0]).view(-1)
            else:
                spread = slots.expand(-1, self.heads, -1).flatten(0, 1)
                target, source = moves(layout.start_dev, layout.length_dev, spread, counts)
            self._move(target, source)
        if most == least and layout.uniform:
            self._grow(-most)
        else:
            self._set_lengths(layout.length - torch.tensor(counts).repeat_interleave(self.heads))
        if layout.should_shrink(layout.length):
            self._rebuild(layout.length, layout.length)

    def _move_one(self, target: int, source: int) -> None:
        """Copy one slot of every run onto another, in uniform runs."""
        for view in self._views:
            view.select(2, target).copy_(view.select(2, source))

    def _move(self, target: Tensor, source: Tensor) -> None:
        """Copy slots onto others; int64 [n], rows of the layout."""
        for buffer in self._buffers():
            buffer.index_copy_(0, target, buffer.index_select(0, source))

    def _checked(self, slots: Tensor, counts: list[int]) -> Tensor:
        """Slots to evict, [B, H or 1, n], on the device."""
        if slots.dim() != 3 or slots.shape[:2] not in ((self.batch, self.heads), (self.batch, 1)):
            raise ValueError(f"slots must be [{self.batch}, {self.heads} or 1, n], got {tuple(slots.shape)}")
        if slots.device.type == "cpu":  # on a device the check would make it wait
            named = slots
            if min(counts) < slots.shape[-1]:  # entries beyond a sequence's count may be anything
                within = torch.arange(slots.shape[-1]) < torch.tensor(counts)[:, None, None]
                named = slots[within.expand_as(slots)]
            low, high = torch.aminmax(named)
            if int(low) < 0 or int(high) >= self._layout.max_length:
                raise ValueError(f"evict names slots {int(low)} to {int(high)} of {self._layout.max_length}")
        return slots.to(self._device)

    def keep(self, mask: Tensor) -> None:
        """Drop every slot whose entry in mask (bool [B, H, M] or [B, 1, M]) is False; padding is ignored.

        Order is preserved. Runs are compacted in place; buffers are replaced by smaller ones when much is spare.
        ValueError: another shape or dtype.
        """
        layout = self._layout
        shape = (self.batch, self.heads, layout.max_length)
        if mask.dtype != torch.bool or mask.dim() != 3 or mask.shape[-1] != layout.max_length:
            raise ValueError(f"keep expects a bool mask {list(shape)}, got {mask.dtype} {tuple(mask.shape)}")
        mask = mask.to(self._device).expand(shape)
        if not layout.uniform:
            mask = mask & layout.valid()
        mask = mask.reshape(self.batch * self.heads, layout.max_length)
        counts = mask.sum(-1).cpu()
        if torch.equal(counts, layout.length):
            return
        if self._quantized is not None:
            self._quantized.moved()
        run, slot = mask.nonzero(as_tuple=True)
        self._close_up(run, slot, counts)

    def _close_up(self, run: Tensor, slot: Tensor, counts: Tensor) -> None:
        """Slots (run [n], slot [n]), in order, become all that their runs hold; counts [R] on the CPU."""
        layout = self._layout
        source = layout.start_dev[run] + slot
        if layout.should_shrink(counts):
            self._rebuild(counts, counts, source)
            return
        target = flat(layout.start_dev, counts.to(self._device), source.shape[0])
        moved = (source != target).nonzero()[:, 0]
        source, target = source[moved], target[moved]
        for buffer in self._buffers():
            shift(buffer, target, source)
        self._set_lengths(counts)

    def in_token_order(self) -> None:
        """Move slots so that every run is in the order of positions; free where it is already. Blank slots go last."""
        layout, positions = self._layout, self.positions()
        keys = torch.where(positions < 0, torch.iinfo(positions.dtype).max, positions)
        if bool((keys[..., 1:] >= keys[..., :-1]).all()):
            return
        order = keys.flatten(0, 1).argsort(dim=-1, stable=True)
        run, slot = layout.valid().flatten(0, 1).nonzero(as_tuple=True)
        if self._quantized is not None:
            self._quantized.moved()
        self._reorder(run, slot, order[run, slot])

    def _reorder(self, run: Tensor, target: Tensor, source: Tensor) -> None:
        """Copy slots source [n] of runs [n] onto slots target [n], all at once."""
        start = self._layout.start_dev[run]
        for buffer in self._buffers():
            buffer.index_copy_(0, start + target, buffer.index_select(0, start + source))

    def crop(self, end: int) -> None:
        """Drop the slots whose position is `end` or later."""
        window = None if self._quantized is None else self._quantized.window
        kept = self._layout.padded(self._positions, end) < end
        if window is None:
            self.keep(kept)
            return
        newest = not bool((kept[..., 1:] & ~kept[..., :-1]).any())  # only the ends of the runs leave
        before, settled = self._layout.length, window.settled
        self.keep(kept)
        gone = before - self._layout.length
        if newest and int(gone.min()) == int(gone.max()):
            window.rewind(int(gone[0]), settled)

    def extend_blank(self, extra: Tensor) -> None:
        """Append extra[r] blank slots (position -1, zeros, fields at their fill) to run r; extra [R] int64.

        Blank quantized slots are zero bytes: values of 0, and keys at the lower end of their channels' ranges.
        ValueError: another shape, or negative counts.
        """
        layout, extra = self._layout, extra.to("cpu", torch.int64)
        if extra.shape != layout.length.shape or bool((extra < 0).any()):
            raise ValueError(f"extra must hold {layout.length.shape[0]} counts of at least 0, got {extra.tolist()}")
        lengths = layout.length + extra
        self._reserve(lengths, written=layout.length)
        if bool((lengths > layout.capacity).any()) or layout.becomes_uniform(lengths):
            self._rebuild(layout.length, lengths)
        if self._quantized is not None:
            self._quantized.moved()
        rows = flat((layout.start + layout.length).to(self._device), extra.to(self._device), int(extra.sum()))
        rows_at = self._at(rows)
        self._keys.index_fill_(0, rows_at, 0)
        self._values.index_fill_(0, rows_at, 0)
        self._positions.index_fill_(0, rows, -1)
        for name, buffer in self._fields.items():
            buffer.index_fill_(0, rows, self._fills[name])
        self._set_lengths(lengths)

    def write(self, runs: Tensor, slots: Tensor, keys: Tensor, values: Tensor, positions: Tensor) -> None:
        """Overwrite n distinct stored slots: runs [n], slots [n], keys [n, D], values [n, Dv], positions [n].

        Side fields keep their values; full-precision copies of the former contents are dropped. ValueError: slots that
        are not stored. Only indices on the CPU are checked; on a device the check would make it wait.
        """
        layout = self._layout
        if runs.device.type == "cpu" and slots.device.type == "cpu" and runs.numel():
            outside = (runs < 0) | (runs >= layout.length.shape[0])
            if bool(outside.any()) or bool(((slots < 0) | (slots >= layout.length[runs])).any()):
                raise ValueError("write reaches beyond the stored slots; call extend_blank first")
        runs = runs.to(self._device)
        rows = layout.start_dev[runs] + slots.to(self._device)
        rows_at = self._to_write(rows)
        keys, values = keys.detach().to(self._device), values.detach().to(self._device)
        if self._quantized is not None:
            quantizer = self._quantized.quantizer
            keys, values = quantizer.quantize_key_rows(keys, runs), quantizer.quantize_values(values)
            if RESIDUAL in self._fields:
                self._fields[RESIDUAL].index_fill_(0, rows, -1)
        self._keys.index_copy_(0, rows_at, keys.to(self._keys.dtype))
        self._values.index_copy_(0, rows_at, values.to(self._values.dtype))
        self._positions.index_copy_(0, rows, positions.to(self._device, torch.int32))

    def select_sequences(self, index: Tensor) -> None:
        """Sequence i becomes a copy of the former sequence index[i]; index [B'] int64. The identity is free.

        ValueError: no sequence, or one that does not exist.
        """
        index, layout = index.to("cpu", torch.int64), self._layout
        if index.dim() != 1 or index.numel() == 0 or bool(((index < 0) | (index >= self.batch)).any()):
            raise ValueError(f"index must hold sequence numbers below {self.batch}, got {index.tolist()}")
        if index.tolist() == list(range(self.batch)):
            return
        former = (index[:, None] * self.heads + torch.arange(self.heads)).view(-1)
        lengths = layout.length[former]
        start = layout.start[former].to(self._device)
        source = flat(start, lengths.to(self._device), int(lengths.sum()))
        if self._quantized is not None:
            self._quantized.select(former, index)
        layout.batch = index.shape[0]
        self._rebuild(lengths, lengths, source)

"""Positions and side fields: one number per stored slot, beside its key and value."""

from __future__ import annotations

import torch
from torch import Tensor

from foveakv.memory.layout import Layout
from foveakv.memory.rows import flat


class SlotFields:
    """The slots of one layer without their keys and values: a layout, positions, and named side fields.

    A field follows its slots through every operation. Fields are flat buffers [N] beside the rows of keys and values.
    """

    _layout: Layout
    _positions: Tensor  # [N] int32
    _fields: dict[str, Tensor]  # [N] each
    _fills: dict[str, float]  # what new slots start with
    _views: list[Tensor]  # all buffers as [B, H, capacity, ...] where runs are strided, in the order of `_buffers`
    _held: int  # bytes of all buffers

    # -- fields ------------------------------------------------------------------------------------------------------

    def add_field(
        self, name: str, padded: Tensor | None = None, dtype: torch.dtype = torch.float32, fill: float = 0
    ) -> None:
        """Attach one value per slot: padded [B, H, M] gives those of the stored slots, new slots start at `fill`.

        ValueError: a field of that name exists.
        """
        if name in self._fields:
            raise ValueError(f"field {name!r} exists already; use set_field to change it")
        self._charge(self._layout.rows, dtype.itemsize)
        with torch.inference_mode(False):
            self._fields[name] = torch.full(self._positions.shape, fill, dtype=dtype, device=self._positions.device)
        self._fills[name] = fill
        self._held += self._fields[name].untyped_storage().nbytes()
        self._refresh_views()
        if padded is not None:
            self.set_field(name, padded)

    @property
    def field_names(self) -> list[str]:
        """Names of all side fields."""
        return list(self._fields)

    def field(self, name: str) -> Tensor:
        """[B, H, M] padded copy; 0 beyond a run's length. KeyError: no such field."""
        return self._layout.padded(self.flat(name), 0)

    def view(self, name: str) -> Tensor:
        """[B, H, M], to be read only: the field itself where runs are uniform, else what `field` gives."""
        if not self._layout.uniform:
            return self.field(name)
        self.flat(name)  # raises where there is no such field
        return self._field_view(name).narrow(2, 0, self._layout.max_length)

    def flat(self, name: str) -> Tensor:
        """[N], the field itself beside the rows of `runs`; rows outside the runs are slack. KeyError: no such field."""
        if name not in self._fields:
            raise KeyError(f"no field {name!r} here, only {sorted(self._fields)}; add_field creates one")
        return self._fields[name]

    def set_field(self, name: str, padded: Tensor) -> None:
        """Replace the values of the stored slots by padded [B, H, M]; its padding is ignored.

        ValueError: another shape. KeyError: no such field.
        """
        buffer, layout = self.flat(name), self._layout
        shape = (layout.batch, layout.heads, layout.max_length)
        if padded.shape != shape:
            raise ValueError(f"field {name!r} needs values {list(shape)}, got {tuple(padded.shape)}")
        if layout.uniform:
            layout.view(buffer)[:, :, : layout.max_length].copy_(padded.detach())
        else:
            kept = padded.detach().to(buffer.device, buffer.dtype)[layout.valid()]
            buffer.index_copy_(0, flat(layout.start_dev, layout.length_dev, kept.shape[0]), kept)

    def add(self, name: str, amounts: Tensor) -> None:
        """Add amounts [B, H, M] to a field, in place where runs are uniform. Padding is ignored."""
        if self._layout.uniform:
            self.view(name).add_(amounts.detach())
        else:
            self.set_field(name, self.field(name).add_(amounts.detach()))

    def put(self, name: str, slots: Tensor, counts: list[int], value: float) -> None:
        """Set a field at single slots: int64 slots [B, H or 1, n] and counts [B] as in `Segments.evict`."""
        layout, n = self._layout, slots.shape[-1]
        rows = layout.start_dev.view(layout.batch, layout.heads, 1) + slots
        if min(counts) < n:
            wanted = torch.arange(n, device=rows.device) < torch.tensor(counts, device=rows.device)[:, None, None]
            rows = rows[wanted.expand_as(rows)]
        self.flat(name).index_fill_(0, rows.view(-1), value)

    # -- positions ---------------------------------------------------------------------------------------------------

    def positions(self) -> Tensor:
        """[B, H, M] int64 logical positions; -1 beyond a run's length and in blank slots."""
        return self._layout.padded(self._positions, -1).to(torch.int64)

    def view_positions(self) -> Tensor:
        """As `positions`, but int32 and to be read only: no copy where runs are uniform."""
        if not self._layout.uniform:
            return self._layout.padded(self._positions, -1)
        return self._views[0].narrow(2, 0, self._layout.max_length)

    # -- buffers -----------------------------------------------------------------------------------------------------

    def _charge(self, rows: int, more: int = 0) -> None:
        """Called before buffers of `rows` rows are allocated, and `more` bytes for each; raises where they do not fit.

        Nothing to do for memory that has no limit.
        """

    def _buffers(self) -> list[Tensor]:
        """All buffers with a row for every slot, in the order of the layout: positions, fields, then others."""
        return [self._positions, *self._fields.values()]

    def _field_view(self, name: str) -> Tensor:
        """A field of strided runs as [B, H, capacity]."""
        return self._views[1 + list(self._fields).index(name)]

    def _refresh_views(self) -> None:
        """Dense views over the whole stride, for cheap appends to uniform runs."""
        self._views = []
        if self._layout.strided:
            with torch.inference_mode(False):
                self._views = [self._layout.view(buffer) for buffer in self._buffers()]

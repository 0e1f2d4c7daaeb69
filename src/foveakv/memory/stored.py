"""The stored slots of one layer as they are read: lengths, keys and values, and what they cost.

Notation: see `runs.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from foveakv.memory.fields import SlotFields
from foveakv.memory.quantized import RESIDUAL, QuantizedRows
from foveakv.memory.quantizer import Quantizer
from foveakv.memory.runs import Runs, dense


class ReadableSlots(SlotFields):
    """Keys, values, positions and side fields of one layer; `Segments` adds what changes them."""

    _keys: Tensor  # [N, D]
    _values: Tensor  # [N, Dv]
    _runs: Runs | None
    _quantized: QuantizedRows | None  # None: rows are numbers

    @property
    def batch(self) -> int:
        """B."""
        return self._layout.batch

    @property
    def heads(self) -> int:
        """H."""
        return self._layout.heads

    @property
    def max_length(self) -> int:
        """M, the length of the longest run."""
        return self._layout.max_length

    @property
    def lengths(self) -> Tensor:
        """[B, H] int64 on the CPU; no device synchronisation."""
        return self._layout.length.view(self.batch, self.heads).clone()

    @property
    def sequence_lengths(self) -> list[int]:
        """[B], the lengths of the first heads, for methods whose heads hold the same number of slots."""
        if self._layout.uniform:
            return [self._layout.max_length] * self.batch
        return self._layout.length[:: self.heads].tolist()

    @property
    def total(self) -> int:
        """Stored slots of all runs."""
        return self._layout.total

    @property
    def device(self) -> torch.device:
        """Where the buffers are."""
        return self._layout.device

    @property
    def quantizer(self) -> Quantizer | None:
        """How keys and values are quantized; None: they are stored as the model computed them."""
        return None if self._quantized is None else self._quantized.quantizer

    @property
    def runs(self) -> Runs:
        """What attention kernels read; the same object until something changes."""
        if self._runs is None:
            layout, quantized = self._layout, self._quantized
            self._runs = Runs(
                self._keys,
                self._values,
                self._positions,
                layout.start_dev,
                layout.length_dev,
                self.batch,
                self.heads,
                layout.max_length,
                layout.uniform,
                layout.start,
                layout.length,
            )
            if quantized is not None:
                self._runs.quantizer = quantized.quantizer
                self._runs.residual = quantized.residual(self._fields.get(RESIDUAL))
        return self._runs

    def dense(self) -> tuple[Tensor, Tensor]:
        """Strided views [B, H, M, D] and [B, H, M, Dv], bytes if quantized; only while `runs.uniform` (ValueError)."""
        return dense(self.runs)

    def valid(self) -> Tensor:
        """[B, H, M] bool: True where a slot is stored."""
        return self._layout.valid()

    def gather(self) -> tuple[Tensor, Tensor]:
        """Padded copies keys [B, H, M, D], values [B, H, M, Dv], zeros beyond a run: for tests and slow paths.

        Of quantized slots it gives what attention reads, in the model's dtype: full-precision copies where there are
        any, else dequantized numbers.
        """
        keys, values = self._padded_rows()
        if self._quantized is None:
            return keys, values
        return self._quantized.dequantized(self._layout, keys, values, self._fields.get(RESIDUAL))

    def _padded_rows(self) -> tuple[Tensor, Tensor]:
        """Stored rows as padded copies [B, H, M, ...], zeros beyond a run."""
        return self._layout.padded(self._keys, 0), self._layout.padded(self._values, 0)

    @property
    def nbytes(self) -> int:
        """Bytes held by keys and values, slack and full-precision copies included."""
        return self._rows_nbytes + (0 if self._quantized is None else self._quantized.window_nbytes)

    @property
    def _rows_nbytes(self) -> int:
        """Bytes held for rows of keys and values."""
        return self._keys.untyped_storage().nbytes() + self._values.untyped_storage().nbytes()

    @property
    def overhead_nbytes(self) -> int:
        """Bytes held for rows of keys and values beyond those of the stored slots."""
        row = self._keys[:1].nbytes + self._values[:1].nbytes
        return self._rows_nbytes - self.total * row

    @property
    def _capacity(self) -> int:
        """Slots that the held rows have room for."""
        return self._keys.shape[0]

    @property
    def side_nbytes(self) -> int:
        """Bytes held by everything else: positions, starts, lengths, fields, scales."""
        held = [self._positions, self._layout.start_dev, self._layout.length_dev, *self._fields.values()]
        scales = 0 if self._quantized is None else self._quantized.quantizer.nbytes
        return scales + sum(tensor.untyped_storage().nbytes() for tensor in held)

    @property
    def held_nbytes(self) -> int:
        """Bytes of the buffers: `nbytes` and `side_nbytes` without starts and lengths. Kept up to date, no cost."""
        return self._held

    @property
    def saved_nbytes(self) -> int:
        """Bytes that quantization saves; negative where scales and full-precision copies take more. Else 0."""
        quantized = self._quantized
        if quantized is None:
            return 0
        entries = self._fields[RESIDUAL].untyped_storage().nbytes() if RESIDUAL in self._fields else 0
        return quantized.plain_nbytes(self._capacity) - self.nbytes - quantized.quantizer.nbytes - entries

    def _buffers(self) -> list[Tensor]:
        return [*super()._buffers(), self._keys, self._values]

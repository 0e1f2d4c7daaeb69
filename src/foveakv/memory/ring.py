"""Exact copies of the newest tokens of every run, for a memory that otherwise holds codes.

All runs grow alike, so a token has the same entry in every run: entries are taken in turns. Which slot an entry belongs
to is written at the slot (int16 per row of the flat buffers, -1 = none) and moves with it. W is the number of entries.
"""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST = 2**15 - 1  # what an int16 can name


class Ring:
    """keys [R, W, D] and values [R, W, Dv], in the dtype of the model."""

    def __init__(self, runs: int, window: int, keys: Tensor, values: Tensor) -> None:
        """An empty ring for rows like keys [..., D] and values [..., Dv]."""
        self.window = window
        self._next = 0  # the entry that the next token takes
        with torch.inference_mode(False):
            # Zeros: an entry that no slot has may meet a weight of 0, and must not be NaN then.
            self.keys = torch.zeros(runs, window, keys.shape[-1], dtype=keys.dtype, device=keys.device)
            self.values = torch.zeros(runs, window, values.shape[-1], dtype=values.dtype, device=keys.device)

    @property
    def nbytes(self) -> int:
        return self.keys.untyped_storage().nbytes() + self.values.untyped_storage().nbytes()

    def enter(self, entries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Copies the last of q new tokens, keys [B, H, q, D] and values [B, H, q, Dv], over the oldest ones.

        entries: int16 [N], the rows' entries; those that are taken over become -1.
        Returns the entries of the last n = min(q, W) tokens, int16 [n].
        """
        first, n = self._next, min(keys.shape[2], self.window)
        self._next = (first + n) % self.window
        if n == 1:
            entries.masked_fill_(entries == first, -1)
            self.keys.select(1, first).copy_(keys[:, :, -1].flatten(0, 1))
            self.values.select(1, first).copy_(values[:, :, -1].flatten(0, 1))
            return entries.new_full((1,), first)
        if n == self.window:
            entries.fill_(-1)
        else:
            entries.masked_fill_((entries >= 0) & ((entries - first) % self.window < n), -1)
        order = torch.arange(first, first + n, device=entries.device) % self.window
        for buffer, source in ((self.keys, keys), (self.values, values)):
            buffer.index_copy_(1, order, source[:, :, -n:].flatten(0, 1).to(buffer.dtype))
        return order.to(torch.int16)

    def rewind(self, tokens: int) -> None:
        """The newest tokens are gone from all runs: the next ones take their entries."""
        self._next = (self._next - min(tokens, self.window)) % self.window

    def select(self, runs: Tensor) -> None:
        """Run i becomes the former run runs[i]; int64 [R']."""
        runs = runs.to(self.keys.device)
        with torch.inference_mode(False):
            self.keys, self.values = self.keys[runs], self.values[runs]

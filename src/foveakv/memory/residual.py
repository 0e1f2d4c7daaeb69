"""Exact copies of the newest tokens of every run, for a memory that otherwise holds codes.

All runs grow alike, so a token has the same entry in every run: entries are taken in turns. Which slot an entry belongs
to is written at the slot (int16 per row of the flat buffers, -1 = none) and moves with it. W is the number of entries.
"""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST = 2**15 - 1  # what an int16 can name


class ResidualWindow:
    """keys [R, W, D] and values [R, W, Dv], in the dtype of the model."""

    def __init__(self, batch: int, heads: int, window: int, keys: Tensor, values: Tensor) -> None:
        """An empty ring for rows like keys [..., D] and values [..., Dv]."""
        self.window = window
        self.next = 0  # the entry that the next token takes
        # How many tokens came since slots last moved. From W on, only the last W slots of a run have entries, in turn.
        self.settled = window
        with torch.inference_mode(False):
            # Zeros: an entry that no slot has may meet a weight of 0, and must not be NaN then.
            self._keys = torch.zeros(batch, heads, window, keys.shape[-1], dtype=keys.dtype, device=keys.device)
            self._values = torch.zeros(batch, heads, window, values.shape[-1], dtype=values.dtype, device=keys.device)
        self._flatten()

    def _flatten(self) -> None:
        with torch.inference_mode(False):
            self.keys, self.values = self._keys.flatten(0, 1), self._values.flatten(0, 1)

    @property
    def nbytes(self) -> int:
        return self._keys.untyped_storage().nbytes() + self._values.untyped_storage().nbytes()

    def release(self, entries: Tensor, count: int) -> None:
        """The next `count` entries are nobody's: looks through entries, int16 [N], wherever slots have moved to."""
        if count >= self.window:
            entries.fill_(-1)
        elif count == 1:
            entries.masked_fill_(entries == self.next, -1)
        else:
            entries.masked_fill_((entries >= 0) & ((entries - self.next) % self.window < count), -1)

    def enter(self, keys: Tensor, values: Tensor) -> Tensor:
        """Copies the last of q new tokens, keys [B, H, q, D] and values [B, H, q, Dv], over the oldest ones.

        Returns the entries of the last n = min(q, W) tokens, int16 [n].
        """
        first, n = self.next, min(keys.shape[2], self.window)
        self.next = (first + n) % self.window
        self.settled = min(self.window, self.settled + n)
        if n == 1:
            self._keys.select(2, first).copy_(keys.select(2, -1))
            self._values.select(2, first).copy_(values.select(2, -1))
            return torch.full((1,), first, dtype=torch.int16, device=self._keys.device)
        order = torch.arange(first, first + n, device=self._keys.device) % self.window
        for buffer, source in ((self._keys, keys), (self._values, values)):
            buffer.index_copy_(2, order, source[:, :, -n:].to(buffer.dtype))
        return order.to(torch.int16)

    def rewind(self, tokens: int, settled: int) -> None:
        """The newest tokens are gone from the ends of all runs, nothing else moved: the next ones take their entries.

        settled: what it was before they went.
        """
        self.next = (self.next - min(tokens, self.window)) % self.window
        self.settled = settled if settled == self.window else max(0, settled - tokens)

    def select(self, index: Tensor) -> None:
        """Sequence i becomes the former sequence index[i]; int64 [B']."""
        index = index.to(self._keys.device)
        with torch.inference_mode(False):
            self._keys, self._values = self._keys[index], self._values[index]
        self._flatten()

"""Full-precision copies of the newest tokens of every run, for memory that is otherwise quantized.

All runs grow alike, so a token has the same entry in every run: entries are reused round-robin. A slot's entry is
stored with the slot (int16 per row of the flat buffers, -1 = none) and moves with it. W is the number of entries.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

LARGEST = 2**15 - 1  # what an int16 can name


@dataclass(frozen=True)
class Residual:
    """What attention kernels see of a residual window: copies, and the slots they belong to.

    Entry e of run r is in use iff some stored slot of the run has slot_entry e; others hold anything finite.
    """

    keys: Tensor  # [R, W, D] in the model's dtype
    values: Tensor  # [R, W, Dv]
    slot_entry: Tensor  # int16 [N], for every row of the flat buffers its entry, or -1


class ResidualWindow:
    """Copies of the last W tokens of every run: keys [R, W, D] and values [R, W, Dv], in the dtype of the model."""

    def __init__(self, batch: int, heads: int, length: int, keys: Tensor, values: Tensor) -> None:
        """An empty window of `length` entries for rows like keys [..., D] and values [..., Dv]."""
        self.length = length
        self.next = 0  # the entry that the next token takes
        # How many tokens came since slots last moved. From W on, only the last W slots of a run have entries, in turn.
        self.settled = length
        with torch.inference_mode(False):
            # Zeros: an entry that no slot has may meet a weight of 0, and must not be NaN then.
            self._keys = torch.zeros(batch, heads, length, keys.shape[-1], dtype=keys.dtype, device=keys.device)
            self._values = torch.zeros(batch, heads, length, values.shape[-1], dtype=values.dtype, device=keys.device)
        self._flatten()

    def _flatten(self) -> None:
        with torch.inference_mode(False):
            self.keys, self.values = self._keys.flatten(0, 1), self._values.flatten(0, 1)

    @property
    def nbytes(self) -> int:
        """Storage bytes of the copies."""
        return self._keys.untyped_storage().nbytes() + self._values.untyped_storage().nbytes()

    def release(self, entries: Tensor, count: int) -> None:
        """Take the next `count` entries from their slots: searches entries, int16 [N], wherever slots have moved to."""
        if count >= self.length:
            entries.fill_(-1)
        elif count == 1:
            entries.masked_fill_(entries == self.next, -1)
        else:
            entries.masked_fill_((entries >= 0) & ((entries - self.next) % self.length < count), -1)

    def enter(self, keys: Tensor, values: Tensor) -> Tensor:
        """Copy the last of q new tokens, keys [B, H, q, D] and values [B, H, q, Dv], over the oldest ones.

        Returns the entries of the last n = min(q, W) tokens, int16 [n].
        """
        first, n = self.next, min(keys.shape[2], self.length)
        self.next = (first + n) % self.length
        self.settled = min(self.length, self.settled + n)
        if n == 1:
            self._keys.select(2, first).copy_(keys.select(2, -1))
            self._values.select(2, first).copy_(values.select(2, -1))
            return torch.full((1,), first, dtype=torch.int16, device=self._keys.device)
        order = torch.arange(first, first + n, device=self._keys.device) % self.length
        for buffer, source in ((self._keys, keys), (self._values, values)):
            buffer.index_copy_(2, order, source[:, :, -n:].to(buffer.dtype))
        return order.to(torch.int16)

    def rewind(self, tokens: int, settled: int) -> None:
        """The newest tokens left the ends of all runs and nothing else moved: the next ones take their entries.

        settled: its value before they left.
        """
        self.next = (self.next - min(tokens, self.length)) % self.length
        self.settled = settled if settled == self.length else max(0, settled - tokens)

    def select(self, index: Tensor) -> None:
        """Sequence i becomes the former sequence index[i]; int64 [B']."""
        index = index.to(self._keys.device)
        with torch.inference_mode(False):
            self._keys, self._values = self._keys[index], self._values[index]
        self._flatten()

"""Where the runs of a layer are in its flat buffers, how long they are and how much room they have.

Notation: see `runs.py`. Lengths and starts are kept on the host, so that planning never waits for a device; copies on
the device serve indexing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from foveakv.memory.rows import equal_lengths, flat

_CPU = torch.device("cpu")


def slack(length: int) -> int:
    """Spare slots of a run with `length` stored slots."""
    return max(8, length // 16)


class Layout:
    """Starts, lengths and capacities of R runs; knows nothing of what the rows hold.

    start, capacity, length: int64 [R] on the CPU. start_dev, length_dev: start and length on the device. Tensors are
    replaced, never changed in place: a `Runs` that was handed out keeps describing what it described.
    """

    start: Tensor
    capacity: Tensor
    length: Tensor
    start_dev: Tensor
    length_dev: Tensor
    rows: int  # N
    max_length: int  # M
    spare: int  # the least of capacity - length
    total: int  # sum of the lengths
    strided: bool  # start[r] = r * capacity for all runs
    uniform: bool  # strided, and all lengths equal

    def __init__(self, batch: int, heads: int, device: torch.device) -> None:
        """Empty runs with the least room."""
        self.batch = batch
        self.heads = heads
        self.device = device
        empty = torch.zeros(batch * heads, dtype=torch.int64)
        self.allocate(empty)
        self.set_lengths(empty)

    # -- changes -----------------------------------------------------------------------------------------------------

    def allocate(self, lengths: Tensor) -> None:
        """Make room for lengths [R] (CPU) and the usual slack; `set_lengths` must follow."""
        self.capacity = lengths + self._room(lengths)
        end = self.capacity.cumsum(0)
        self.start = end - self.capacity
        self.start_dev = self.start.to(self.device, non_blocking=True)
        self.strided = int(lengths.min()) == int(lengths.max())
        self.rows = int(end[-1])

    def rows_for(self, lengths: Tensor) -> int:
        """The rows that `allocate` makes for lengths [R]."""
        return int(lengths.sum()) + self._room(lengths) * lengths.shape[0]

    def set_lengths(self, lengths: Tensor) -> None:
        """Record lengths [R] (CPU) that fit the present capacities."""
        self.length = lengths
        self.length_dev = lengths.to(self.device, non_blocking=True)
        self.max_length = int(lengths.max())
        self.total = int(lengths.sum())
        self.spare = int((self.capacity - lengths).min())
        self.uniform = self.strided and int(lengths.min()) == self.max_length

    def grow(self, by: int) -> None:
        """All runs become `by` slots longer, or shorter where it is negative."""
        runs = self.length.shape[0]
        self.max_length += by
        self.spare -= by
        self.total += by * runs
        if self.uniform:
            self.length = equal_lengths(runs, self.max_length, _CPU)
            self.length_dev = self.length if self.device == _CPU else equal_lengths(runs, self.max_length, self.device)
        else:
            self.length = self.length + by
            self.length_dev = self.length if self.device == _CPU else self.length_dev + by

    # -- questions ---------------------------------------------------------------------------------------------------

    def should_shrink(self, lengths: Tensor) -> bool:
        """Whether runs of these lengths [R] should move into smaller buffers, or into regular ones."""
        if lengths is self.length and self.uniform:  # asked after every eviction: plain numbers
            return self.rows > lengths.shape[0] * (self.max_length + 2 * slack(self.max_length))
        allowed = int(lengths.sum()) + 2 * lengths.shape[0] * self._room(lengths)
        return self.rows > allowed or self.becomes_uniform(lengths)

    def becomes_uniform(self, lengths: Tensor) -> bool:
        """Whether a new layout for these lengths [R] would have dense views, which this one has not."""
        return not self.strided and int(lengths.min()) == int(lengths.max())

    def _room(self, lengths: Tensor) -> int:
        """Spare slots for each run: the mean of slack(length), the same for all, since appends grow all runs alike.

        It costs no more bytes than slack(length) per run, and one short run cannot force a regrow every 8 tokens.
        """
        return max(8, int((lengths // 16).sum()) // lengths.shape[0])

    # -- rows and padded coordinates ---------------------------------------------------------------------------------

    def stored_rows(self) -> Tensor:
        """All stored rows in run order: int64 [total]."""
        return flat(self.start_dev, self.length_dev, self.total)

    def next_rows(self, q: int) -> Tensor:
        """The rows that q new slots of every run take, in run order: int64 [R * q]."""
        rows = self.start_dev + self.length_dev
        return rows if q == 1 else (rows[:, None] + torch.arange(q, device=self.device)).view(-1)

    def valid(self) -> Tensor:
        """[B, H, M] bool: True where a slot is stored."""
        slots = torch.arange(self.max_length, device=self.device)
        return (slots < self.length_dev[:, None]).view(self.batch, self.heads, self.max_length)

    def view(self, buffer: Tensor) -> Tensor:
        """Flat buffer [N, ...] of strided runs as [B, H, capacity, ...], no copy."""
        return buffer.view(self.batch, self.heads, -1, *buffer.shape[1:])

    def padded(self, buffer: Tensor, beyond: float) -> Tensor:
        """Flat buffer [N, ...] -> copy [B, H, M, ...] with `beyond` in the padding."""
        if self.uniform:
            return self.view(buffer)[:, :, : self.max_length].clone()
        slots = torch.arange(self.max_length, device=self.device)
        rows = self.start_dev[:, None] + slots
        padding = slots >= self.length_dev[:, None]
        padded = buffer[rows.masked_fill_(padding, 0)]
        padded[padding] = beyond
        return padded.view(self.batch, self.heads, self.max_length, *buffer.shape[1:])

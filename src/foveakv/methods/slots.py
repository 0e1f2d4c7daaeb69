"""What a method sees of stored slots and of offloaded chunks. For the notation see `foveakv.methods.views`."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class Slots(Protocol):
    """The stored slots of one layer, with per-slot values of the method (fields).

    Padded tensors are [B, H, M]; entries at or beyond a head's length are undefined. Slots are stored in the order of
    tokens until a decision evicts single slots (`Evict`); positions give the order of tokens in any case.
    """

    @property
    def batch(self) -> int:
        """B."""

    @property
    def heads(self) -> int:
        """H."""

    @property
    def max_length(self) -> int:
        """M."""

    @property
    def lengths(self) -> Tensor:
        """Number of slots per head: int64 [B, H], on the CPU."""

    @property
    def sequence_lengths(self) -> list[int]:
        """Number of slots in the first head, [B], for methods whose heads all store the same number."""

    @property
    def device(self) -> torch.device:
        """Device of the stored tensors."""

    @property
    def uniform(self) -> bool:
        """Whether all heads of all sequences store M slots."""

    def positions(self) -> Tensor:
        """Return the positions of the slots: integers [B, H, M], -1 beyond a head's length; read-only."""

    def valid(self) -> Tensor:
        """Return where slots are stored: bool [B, H, M]."""

    def keys(self) -> Tensor:
        """Return a copy of the keys, for analyses: [B, H, M, D], zeros beyond a head's length."""

    def field(self, name: str) -> Tensor:
        """Return a field: padded [B, H, M], read-only."""

    def add(self, name: str, amounts: Tensor) -> None:
        """Add amounts [B, H, M] to a field."""

    def put(self, name: str, slots: Tensor, counts: list[int], value: float) -> None:
        """Set a field at single slots; slots [B, H or 1, n] and counts as in `Evict`."""

    def set_field(self, name: str, padded: Tensor) -> None:
        """Replace a field by padded [B, H, M]."""

    def add_and_find(
        self,
        name: str,
        amounts: Tensor,
        low: list[int],
        high: list[int],
        *,
        per_head: bool,
        by_position: bool,
        mark: str | None = None,
    ) -> Tensor | None:
        """Add amounts to a field and find the slot with the lowest value of every group in the same pass.

        A group is a head, or without `per_head` a sequence, whose heads' values are summed. Candidates are the slots
        from `low` on and below `high` (one of each per group), counted by position or by slot. mark: a bool field;
        marked slots are not candidates, and the slot that is found becomes marked.

        Returns:
            Slots int64 [B, H or 1, 1]; None if this is not available, in which case nothing was added.
        """


class Chunks(Protocol):
    """The offloaded chunks of one layer. The n rows are the (sequence, KV head) pairs that select chunks."""

    def relevance(self, query: Tensor, scaling: float) -> Tensor:
        """Return the log of the maximum over queries of the softmax over chunks of q . digest: [n, P].

        query: [B, Hq, q, D].
        """

"""View of a layer's stored slots for methods: `foveakv.methods.views.Slots` over `Segments`."""

from __future__ import annotations

import torch
from torch import Tensor

from foveakv.kernels import COMPILED, cpu_scores
from foveakv.kernels.cpu_chunks import chunk_kernel
from foveakv.memory.chunks import ChunkStore
from foveakv.memory.segments import Segments


class StoredSlots:
    """View of one layer's segments during a decode step; implements `foveakv.methods.views.Slots`."""

    __slots__ = ("_backend", "_segments")

    def __init__(self, segments: Segments, backend: str = "auto") -> None:
        self._segments = segments
        self._backend = backend  # of the cache

    @property
    def batch(self) -> int:
        """Number of sequences, B."""
        return self._segments.batch

    @property
    def heads(self) -> int:
        """Number of KV heads, H."""
        return self._segments.heads

    @property
    def max_length(self) -> int:
        """The most slots that a head stores, M."""
        return self._segments.max_length

    @property
    def lengths(self) -> Tensor:
        """Number of slots per head: int64 [B, H], on the CPU."""
        return self._segments.lengths

    @property
    def sequence_lengths(self) -> list[int]:
        """Number of slots in the first head of every sequence, [B]."""
        return self._segments.sequence_lengths

    @property
    def device(self) -> torch.device:
        """Device of the stored tensors."""
        return self._segments.device

    @property
    def uniform(self) -> bool:
        """Whether all heads of all sequences store M slots."""
        return self._segments.runs.uniform

    def positions(self) -> Tensor:
        """Return the positions of the slots: integers [B, H, M], -1 beyond a head's length; read-only."""
        return self._segments.view_positions()

    def valid(self) -> Tensor:
        """Return where slots are stored: bool [B, H, M]."""
        return self._segments.valid()

    def keys(self) -> Tensor:
        """Return a copy of the keys: [B, H, M, D], zeros beyond a head's length."""
        return self._segments.gather()[0]

    def field(self, name: str) -> Tensor:
        """Return a field: padded [B, H, M], read-only."""
        return self._segments.view(name)

    def add(self, name: str, amounts: Tensor) -> None:
        """Add amounts [B, H, M] to a field."""
        self._segments.add(name, amounts)

    def put(self, name: str, slots: Tensor, counts: list[int], value: float) -> None:
        """Set a field at single slots; slots [B, H or 1, n] and counts as in `Evict`."""
        self._segments.put(name, slots, counts, value)

    def set_field(self, name: str, padded: Tensor) -> None:
        """Replace a field by padded [B, H, M]."""
        self._segments.set_field(name, padded)

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
        """Add to a field and find the lowest slot of every group in one pass; None if only possible in two passes."""
        segments = self._segments
        if self._backend not in COMPILED or not cpu_scores.usable(segments.flat(name), amounts):
            return None
        return cpu_scores.add_and_find(
            segments.runs, segments.flat(name), amounts, low, high, per_head=per_head, by_position=by_position,
            marked=None if mark is None else segments.flat(mark),
        )  # fmt: skip


class StoredChunks:
    """The offloaded chunks of a layer as a method sees them: `foveakv.methods.views.Chunks` over a `ChunkStore`."""

    __slots__ = ("_backend", "_store")

    def __init__(self, store: ChunkStore, backend: str = "auto") -> None:
        self._store = store
        self._backend = backend  # of the cache

    def relevance(self, query: Tensor, scaling: float) -> Tensor:
        """See `foveakv.methods.views.Chunks.relevance`."""
        return self._store.relevance(query, scaling, chunk_kernel(query.device, self._backend))

"""Requests as the workers know them: while the prompt is read, and once it is compressed."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from foveakv.methods import Method
from foveakv.methods.views import PromptView


class PagedStore(Protocol):
    """The paged keys and values of this rank, as an attention backend lays them out."""

    size: int
    """Slots per block."""
    heads: int
    """KV heads of this rank, H."""
    index: Mapping[str, int]
    """Indices of the layers by vLLM's names."""

    def read(self, idx: int, blocks: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
        """Copy the keys and values of a layer from the first `tokens` slots of consecutive blocks.

        idx: index of the layer, from 0. blocks: int64 [n], ids of blocks in order.

        Returns:
            Keys and values, [tokens, H, D] each.
        """

    def keys(self, idx: int, blocks: Tensor, tokens: int) -> Tensor:
        """Copy the keys only, see `read`: [tokens, H, D]."""

    def dot(self, idx: int, blocks: Tensor, tokens: int, query: Tensor) -> Tensor:
        """Return q . k of all query heads and the first `tokens` slots; query: [q, Hq, D] -> [Hq, q, tokens], float32.

        `products(query, store.keys(...))`, unless the layout has a faster way.
        """

    def move(self, idx: int, source: Tensor, target: Tensor) -> None:
        """Copy keys and values of a layer between slots, int64 [n] each; slot = block * size + offset.

        All of them are read before any is written, so slots may be in both.
        """


def products(query: Tensor, keys: Tensor) -> Tensor:
    """Return q . k of every query head and the keys of its KV head: [q, Hq, D], [n, H, D] -> [Hq, q, n], float32."""
    heads, rows = keys.shape[1], query.shape[0]
    grouped = query.float().unflatten(1, (heads, -1)).permute(1, 2, 0, 3).flatten(1, 2)  # [H, G * q, D]
    return (grouped @ keys.float().permute(1, 2, 0)).unflatten(1, (-1, rows)).flatten(0, 1)


class Ranks(Protocol):
    """The tensor-parallel ranks, which hold different heads of every layer."""

    def gather_heads(self, local: Tensor) -> Tensor:
        """Return the heads of all ranks: [n, heads of this rank, D] -> [n, heads, D]."""


@dataclass
class Reading:
    """A request whose prompt is being read.

    rows: bool [C], the query rows that the method observes. state: what `begin` returned. queries: by layer, [C, Hq, D]
    of this rank, zeros in rows that are not observed.
    """

    method: Method
    view: PromptView
    rows: Tensor
    state: Any
    queries: dict[int, Tensor] = field(default_factory=dict)

    def take(self, idx: int, start: int, query: Tensor) -> None:
        """Keep the observed rows of a chunk. query: [n, Hq, D], rows of prompt tokens start, start + 1, ..."""
        wanted = self.rows[start : start + query.shape[0]].to(query.device)
        if not bool(wanted.any()):
            return
        if idx not in self.queries:
            self.queries[idx] = query.new_zeros(self.rows.shape[0], *query.shape[1:])
        self.queries[idx][start : start + query.shape[0]][wanted] = query[wanted]


@dataclass(frozen=True)
class Eviction:
    """What was evicted in one step, the same in all layers.

    tokens: length of the context after the step. stored: number of tokens stored afterwards. source, target: int64 [n],
    numbers of stored tokens: those that move, and where to.
    """

    tokens: int
    stored: int
    source: Tensor
    target: Tensor


@dataclass
class Compressed:
    """A request whose prompt is compressed.

    kept: int64 [n], prompt tokens that are stored when the prompt is complete, ascending. prompt: number of prompt
    tokens. epoch: see `plan.Chunk`. decoding: the method and its state, if it is called in decode steps. seen: length
    of the context that it has seen. history: its evictions while decoding. failed: whether the method has failed while
    decoding, so that the request must end.

    The rest describes the stored tokens, and starts anew when the request is recomputed after a preemption. order:
    int64 [m], tokens stored of the first `upto` ones, in the order of slots; all later ones follow. redone: number of
    evictions of `history` that are in it. first_block: id of the first block of its table, None while preempted.
    freed: entries of its table that are not used.
    """

    req_id: str
    kept: Tensor
    prompt: int
    epoch: int = 1
    decoding: Reading | None = None
    seen: int = 0
    history: list[Eviction] = field(default_factory=list)
    failed: bool = False
    order: Tensor = field(init=False)
    upto: int = field(init=False)
    redone: int = 0
    first_block: int | None = None
    freed: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        self.seen = max(self.seen, self.prompt)
        self.reset()

    def reset(self) -> None:
        """The request has lost its blocks; what was decided stays valid."""
        self.order, self.upto, self.redone = self.kept, self.prompt, 0
        self.first_block, self.freed = None, ()

    @property
    def evicted(self) -> int:
        """Number of evicted tokens."""
        return self.upto - self.order.shape[0]

    @property
    def checksum(self) -> int:
        """Checksum of the tokens stored of the first `upto` ones, in their order."""
        return zlib.crc32(self.order.numpy().tobytes())

    def stored(self, tokens: int) -> Tensor:
        """Return which of the first `tokens` >= upto tokens of the context are stored, in the order of slots."""
        return torch.cat([self.order, torch.arange(self.upto, tokens)])

    def missing(self, stop: int) -> list[Eviction]:
        """Return the evictions up to a length of the context that a recomputed request has yet to repeat."""
        return [each for each in self.history[self.redone :] if each.tokens <= stop]

    def carry_out(self, eviction: Eviction) -> None:
        """Take note that an eviction, the next one of `history`, has been carried out in all layers."""
        order = self.stored(eviction.tokens)
        order[eviction.target] = order[eviction.source]
        self.order, self.upto = order[: eviction.stored], eviction.tokens
        self.redone += 1


@dataclass
class Step:
    """A step of a compressed request that needs more than vLLM's attention: replays, or a method that is called.

    start, stop: the new tokens of the context. row: row of token `start` in the batch. blocks: int64 [n], the blocks
    in use. offset: token t is written as number t - offset. queries: by layer, the rows that the method has not seen,
    [q, Hq, D] of this rank.
    """

    known: Compressed
    start: int
    stop: int
    row: int
    blocks: Tensor
    offset: int
    queries: dict[int, Tensor] = field(default_factory=dict)

    @property
    def first_new(self) -> int:
        """First token that the method has not seen."""
        return max(self.start, self.known.seen)


@dataclass(frozen=True)
class Outcome:
    """What happened to a request, for tests and the self-test. kept: prompt tokens. freed: entries of its table."""

    req_id: str
    prompt: int
    kept: list[int]
    freed: tuple[int, ...]

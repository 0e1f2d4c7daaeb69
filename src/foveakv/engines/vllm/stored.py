"""Requests as the workers know them: while the prompt is read, and once it is compressed."""

from __future__ import annotations

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
    index: Mapping[str, int]
    """Indices of the layers by vLLM's names."""

    def read(self, idx: int, blocks: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
        """Copy the keys and values of a layer from the first `tokens` slots of consecutive blocks.

        idx: index of the layer, from 0. blocks: int64 [n], ids of blocks in order.

        Returns:
            Keys and values, [tokens, H, D] each; H: KV heads of this rank.
        """

    def write(self, idx: int, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        """Write keys and values [n, H, D] to slots int64 [n] of a layer; slot = block * size + offset."""


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


@dataclass
class Compressed:
    """A request whose prompt is compressed.

    kept: int64 [n], prompt tokens that are stored, ascending. prompt: number of prompt tokens. first_block: id of the
    first block of its table. freed: entries of its table that are not used, consecutive. first_block is None while the
    request is preempted.
    """

    req_id: str
    kept: Tensor
    prompt: int
    freed: tuple[int, ...] = ()
    first_block: int | None = None

    @property
    def evicted(self) -> int:
        """Number of evicted tokens."""
        return self.prompt - self.kept.shape[0]

    def stored(self, tokens: int) -> Tensor:
        """Return which of the first `tokens` tokens of the context are stored, in order; tokens >= prompt."""
        return torch.cat([self.kept, torch.arange(self.prompt, tokens)])


@dataclass(frozen=True)
class Outcome:
    """What happened to a request, for tests and the self-test. kept: prompt tokens. freed: entries of its table."""

    req_id: str
    prompt: int
    kept: list[int]
    freed: tuple[int, ...]

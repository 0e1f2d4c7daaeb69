"""A prompt with offloaded chunks, and which chunks every head should read, computed the slow way."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from foveakv.memory.chunks import ChunkStore
from foveakv.memory.segments import Segments

CHUNK, DIM, VALUE_DIM, GROUP = 8, 16, 12, 3


class Layer:
    """A prompt whose `dynamic` heads keep only their incomplete last chunk in the segments."""

    def __init__(self, dynamic: list[list[bool]], lengths: list[int], seed: int = 0, **options: Any) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.dynamic = torch.tensor(dynamic)
        self.batch, self.heads = self.dynamic.shape
        self.columns = max(lengths)
        dtype = options.pop("dtype", torch.float32)
        shape = (self.batch, self.heads, self.columns)
        self.keys = torch.randn(*shape, DIM, generator=generator).to(dtype)
        self.values = torch.randn(*shape, VALUE_DIM, generator=generator).to(dtype)
        self.pads = [self.columns - length for length in lengths]
        self.real = torch.arange(self.columns) >= torch.tensor(self.pads)[:, None]
        self.positions = torch.arange(self.columns).expand(self.batch, -1)
        self.counts = [length // CHUNK for length in lengths]
        self.store = ChunkStore(self.keys, self.values, self.real, self.positions, self.dynamic, chunk=CHUNK, **options)
        rank = self.real.cumsum(-1) - 1
        tail = self.real & (rank >= (torch.tensor(self.counts) * CHUNK)[:, None])
        keep = torch.where(self.dynamic[..., None], tail[:, None], self.real[:, None])
        self.segments = Segments.from_dense(self.keys, self.values, keep, self.positions)
        self.generator = generator

    def columns_of(self, b: int, number: int) -> list[int]:
        first = self.pads[b] + number * CHUNK
        return list(range(first, first + CHUNK))

    def query(self, q: int = 1) -> Tensor:
        return torch.randn(self.batch, self.heads * GROUP, q, DIM, generator=self.generator).to(self.keys.dtype) * 2

    def best(self, query: Tensor, b: int, h: int, slots: int, scaling: float = 0.25) -> set[int]:
        """The chunks that head h of sequence b should hold, computed the slow way."""
        digests = torch.stack([self.keys[b, h, self.columns_of(b, n)].float().mean(0) for n in range(self.counts[b])])
        wanted = torch.zeros(self.counts[b])
        for g in range(GROUP):
            for t in range(query.shape[2]):
                scores = digests @ query[b, h * GROUP + g, t].float() * scaling
                wanted = torch.maximum(wanted, scores.softmax(-1))
        return set(wanted.topk(min(slots, self.counts[b])).indices.tolist())

    def stored(self, b: int, h: int) -> list[int]:
        found = self.segments.positions()[b, h]
        return found[found >= 0].tolist()

    def check(self, expected: dict[tuple[int, int], set[int]]) -> None:
        """Every dynamic head holds its tail and the expected chunks, with the right keys and values."""
        keys, values = self.segments.gather()
        positions = self.segments.positions()
        for (b, h), chunks in expected.items():
            tail = list(range(self.pads[b] + self.counts[b] * CHUNK, self.columns))
            columns = [c for number in chunks for c in self.columns_of(b, number)]
            assert sorted(self.stored(b, h)) == sorted(tail + columns)
            for slot in range(int(self.segments.lengths[b, h])):
                column = int(positions[b, h, slot])
                assert torch.equal(keys[b, h, slot], self.keys[b, h, column])
                assert torch.equal(values[b, h, slot], self.values[b, h, column])


def relevance(layer: Layer, query: Tensor) -> Tensor:
    """Relevance of every chunk of the heads that choose, [n, P]; nothing where none does."""
    return layer.store.relevance(query, 0.25) if layer.store.choosing else torch.empty(0, 0)


def fetch(layer: Layer, query: Tensor) -> tuple[int, int]:
    """Copies the best chunks into slots: (slots asked for, slots that were there)."""
    return layer.store.fetch(layer.segments, relevance(layer, query))


def pick(layer: Layer, query: Tensor) -> tuple[int, int]:
    """The same for chunks that are read in place."""
    return layer.store.pick(relevance(layer, query))


def attended(layer: Layer, query: Tensor, in_place: bool) -> Tensor:
    """Positions [B, H, M] that a step with this query attends to, -1 where none."""
    if not in_place:
        fetch(layer, query)
        return layer.segments.positions()
    pick(layer, query)
    chosen = layer.store.chosen_positions()
    own = layer.segments.positions()
    return own if chosen is None else torch.cat([own, chosen], -1)


RAGGED: dict[str, Any] = {"dynamic": [[True, False, True], [False, True, False]], "lengths": [83, 46]}

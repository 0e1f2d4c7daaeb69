"""The slots and the chunks that a method sees, over plain tensors and lists: each does what the protocol says."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from foveakv.methods import Offload


class PlainSlots:
    """`foveakv.methods.views.Slots` over padded tensors [B, H, M]."""

    def __init__(self, keys: Tensor, positions: Tensor, keep: Tensor) -> None:
        """keys [B, H, C, D], positions [B, C], keep bool [B, H, C]."""
        self.stored = {"keys": keys.clone(), "positions": positions[:, None].expand(keep.shape).clone()}
        self.count = torch.full(keep.shape[:2], keep.shape[2])
        self.keep(keep)

    @property
    def batch(self) -> int:
        return self.count.shape[0]

    @property
    def heads(self) -> int:
        return self.count.shape[1]

    @property
    def max_length(self) -> int:
        return int(self.count.max())

    @property
    def lengths(self) -> Tensor:
        return self.count.clone()

    @property
    def sequence_lengths(self) -> list[int]:
        return self.count[:, 0].tolist()

    @property
    def device(self) -> torch.device:
        return self.count.device

    @property
    def uniform(self) -> bool:
        return bool((self.count == self.max_length).all())

    def valid(self) -> Tensor:
        return torch.arange(self.max_length) < self.count[..., None]

    def _padded(self, name: str, beyond: float = 0) -> Tensor:
        values, valid = self.stored[name][:, :, : self.max_length].clone(), self.valid()
        values[~valid] = beyond
        return values

    def positions(self) -> Tensor:
        return self._padded("positions", -1)

    def keys(self) -> Tensor:
        return self._padded("keys")

    def field(self, name: str) -> Tensor:
        return self._padded(name)

    def set_field(self, name: str, padded: Tensor) -> None:
        assert padded.shape == (self.batch, self.heads, self.max_length)
        self.stored[name] = padded.to(self.stored[name].dtype).clone()

    def add(self, name: str, amounts: Tensor) -> None:
        self.set_field(name, self.field(name) + amounts)

    def put(self, name: str, slots: Tensor, counts: list[int], value: float) -> None:
        changed = self.field(name)
        for b, count in enumerate(counts):
            for h in range(self.heads):
                changed[b, h, slots[b, h % slots.shape[1], :count]] = value
        self.set_field(name, changed)

    def add_and_find(self, *args: Any, **kwargs: Any) -> None:
        """Not available here."""

    def add_field(self, name: str, values: Tensor) -> None:
        self.stored[name] = values

    def _take(self, orders: list[list[list[int]]]) -> None:
        """Head (b, h) stores its slots orders[b][h], in that order."""
        self.count = torch.tensor([[len(order) for order in row] for row in orders])
        for name, values in self.stored.items():
            taken = values.new_zeros(*values.shape[:2], self.max_length, *values.shape[3:])
            for b, row in enumerate(orders):
                for h, order in enumerate(row):
                    taken[b, h, : len(order)] = values[b, h, order]
            self.stored[name] = taken

    def keep(self, mask: Tensor) -> None:
        """Evicts what bool [B, H or 1, M] does not mark; the others close up in order."""
        mask = mask.expand(self.batch, self.heads, -1) & self.valid()
        self._take([[head.nonzero()[:, 0].tolist() for head in row] for row in mask])

    def evict(self, slots: Tensor | int, counts: list[int]) -> None:
        """Evicts single slots: the holes, in the order given, take the last slots that stay."""
        if isinstance(slots, int):
            slots = torch.full((self.batch, 1, 1), slots)
        orders = []
        for b, count in enumerate(counts):
            orders.append([])
            for h in range(self.heads):
                length = int(self.count[b, h])
                leaving, order = slots[b, h % slots.shape[1], :count].tolist(), list(range(length))
                assert len(set(leaving)) == count, "slots are distinct"
                assert all(0 <= slot < length for slot in leaving), "only stored slots are evicted"
                tail = [slot for slot in range(length - count, length) if slot not in leaving]
                for hole in leaving:
                    if hole < length - count:
                        order[hole] = tail.pop(0)
                orders[-1].append(order[: length - count])
        self._take(orders)

    def append(self, keys: Tensor, positions: Tensor) -> None:
        """keys [B, H, q, D], positions [q]; fields of new slots start at 0."""
        new = keys.shape[2]
        for name, values in self.stored.items():
            wide = torch.cat([values, values.new_zeros(*values.shape[:2], new, *values.shape[3:])], 2)
            for b, row in enumerate(self.count.tolist()):
                for h, length in enumerate(row):
                    given = {"keys": keys[b, h], "positions": positions}.get(name, values.new_zeros(new))
                    wide[b, h, length : length + new] = given
            self.stored[name] = wide
        self.count = self.count + new


class PlainChunks:
    """`foveakv.methods.views.Chunks`: the rows are the heads that choose, each with its chunks' keys and positions."""

    def __init__(self, offload: Offload, keys: Tensor, real: Tensor, positions: Tensor) -> None:
        self.offload, self.heads = offload, keys.shape[1]
        self.all: dict[tuple[int, int], list[tuple[Tensor, list[int]]]] = {}
        for b, h in offload.heads.nonzero().tolist():
            columns = real[b].nonzero()[:, 0]
            parts = columns[: len(columns) // offload.chunk * offload.chunk].view(-1, offload.chunk)
            self.all[b, h] = [(keys[b, h, part], positions[b, part].tolist()) for part in parts]
        self.slots: dict[tuple[int, int], int] = {}
        self.chosen: dict[tuple[int, int], list[int]] = {}  # numbers of the chunks that a step reads

    def reserve(self, chunks: Tensor) -> None:
        for (b, h), parts in self.all.items():
            self.slots[b, h] = min(int(chunks[b, h]), len(parts))
            self.chosen[b, h] = list(range(len(parts) - self.slots[b, h], len(parts)))  # at first the newest

    @property
    def rows(self) -> list[tuple[int, int]]:
        return [key for key, parts in self.all.items() if 0 < self.slots.get(key, 0) < len(parts)]

    def relevance(self, query: Tensor, scaling: float) -> Tensor:
        longest = max(len(self.all[row]) for row in self.rows)
        found = query.new_full((len(self.rows), longest), -torch.inf)
        for i, (b, h) in enumerate(self.rows):
            keys = torch.stack([part for part, _ in self.all[b, h]])  # [P, T, D]
            own = query[b].unflatten(0, (self.heads, -1))[h].flatten(0, 1) * scaling  # [G * q, D]
            if self.offload.summary == "mean":
                scores = own @ keys.mean(1).T
            else:
                scores = torch.maximum(own[:, None] * keys.amin(1), own[:, None] * keys.amax(1)).sum(-1)
            found[i, : len(keys)] = scores.log_softmax(-1).amax(0)
        return found

    def choose(self, relevance: Tensor) -> None:
        for row, wanted in zip(self.rows, relevance, strict=True):
            self.chosen[row] = wanted.topk(self.slots[row]).indices.tolist()

    def positions(self, b: int, h: int) -> list[int]:
        return [p for n in self.chosen.get((b, h), []) for p in self.all[b, h][n][1]]

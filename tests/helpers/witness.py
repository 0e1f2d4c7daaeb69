"""What attention is handed in every decode step, read from its arguments and not from the library's own record.

The trace says what the library believes that a step attended to. Inside `witnessed`, the arguments of the attention
kernels are copied as they arrive: keys, values and positions of the stored slots, and of the pages that are read from a
store. `check` compares the two.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from masked_reference import Stored, Trace
from torch import Tensor

from foveakv import CompressedCache
from foveakv.engines.transformers import layer as layers
from foveakv.memory.runs import padded_rows


@dataclass
class Witness:
    """Steps of every cache, by its id: one dict for each forward pass, layer index -> what was attended to.

    `streams`: bool [B, C] for every cache that pruned the residual stream, the tokens that stayed in it.
    """

    steps: dict[int, dict[int, dict[int, Stored]]] = field(default_factory=lambda: defaultdict(dict))
    streams: dict[int, Tensor] = field(default_factory=dict)

    def of(self, cache: Any) -> list[dict[int, Stored]]:
        """The steps of one cache, as many as its trace has."""
        steps = self.steps[id(cache)]
        return [steps.get(number, {}) for number in range(len(cache.trace))]


@contextmanager
def witnessed() -> Iterator[Witness]:
    """Records the steps of all caches that have a trace."""
    witness, running = Witness(), []
    attend, prune = layers.CompressedLayer.attend, CompressedCache.prune_stream
    decode, paged = layers.decode_attention, layers.attend_with_pages

    def attending(self: Any, *args: Any) -> Tensor:
        running.append(self)
        try:
            return attend(self, *args)
        finally:
            running.pop()

    def note(stored: Stored) -> None:
        cache = running[-1].cache
        if cache.trace is not None:
            witness.steps[id(cache)].setdefault(len(cache.trace) - 1, {})[running[-1].layer_idx] = stored

    def decoding(query: Tensor, runs: Any, *args: Any, **kwargs: Any) -> Any:
        note(slots_of(runs))
        return decode(query, runs, *args, **kwargs)

    def paging(query: Tensor, runs: Any, scaling: float, pages: Any, *args: Any, **kwargs: Any) -> Any:
        note(joined(slots_of(runs), pages_of(pages, running[-1].store.chosen_positions())))
        return paged(query, runs, scaling, pages, *args, **kwargs)

    def pruning(self: Any, *args: Any) -> None:
        prune(self, *args)
        if self.stream is not None:
            index, valid = self.stream.index, self.stream.valid
            stayed = torch.zeros(self.full_prompt.real.shape, dtype=torch.bool)
            witness.streams[id(self)] = stayed.scatter_add(1, index, valid)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layers.CompressedLayer, "attend", attending)
        patch.setattr(layers, "decode_attention", decoding)
        patch.setattr(layers, "attend_with_pages", paging)
        patch.setattr(CompressedCache, "prune_stream", pruning)
        yield witness


def slots_of(runs: Any) -> Stored:
    """Copies of the stored slots, padded; without keys and values where these are quantized."""
    slot = torch.arange(int(runs.length.max()))
    valid = slot < runs.length[:, None]
    row = (runs.start[:, None] + slot).where(valid, 0)
    shape = runs.batch, runs.heads, len(slot)
    positions = runs.positions[row].long().where(valid, -1).view(shape)
    if runs.quantizer is not None:
        return positions, None, None
    if runs.table is not None:
        row = padded_rows(runs)[0]
    return positions, runs.keys[row].view(*shape, -1), runs.values[row].view(*shape, -1)


def pages_of(pages: Any, positions: Tensor) -> Stored:
    """Copies of the pages that the runs read, and the positions that the store has for them."""
    shape = positions.shape
    table = pages.table.clamp_min(0)
    keys, values = (stored[table].reshape(*shape, -1) for stored in (pages.keys, pages.values))
    tokens = positions.shape[-1] // max(pages.table.shape[1], 1)
    read = (pages.table >= 0).repeat_interleave(tokens, 1).view(shape)
    assert torch.equal(read, positions >= 0), "other pages are read than the store has positions for"
    return positions, keys, values


def joined(slots: Stored, pages: Stored) -> Stored:
    """Slots and pages side by side."""
    positions = torch.cat([slots[0], pages[0]], -1)
    if slots[1] is None or slots[2] is None:
        return positions, None, None
    return positions, torch.cat([slots[1], pages[1]], -2), torch.cat([slots[2], pages[2]], -2)


def check(trace: Trace, steps: Sequence[dict[int, Stored]]) -> None:
    """The trace has, for every step and layer, the positions that attention was handed, and no others."""
    assert len(trace) == len(steps)
    for number, (said, done) in enumerate(zip(trace, steps, strict=True)):
        assert said is not None
        assert said.keys() == done.keys(), f"step {number}: traced {sorted(said)}, attended {sorted(done)}"
        for layer, traced in said.items():
            here = f"step {number}, layer {layer}: the trace is not what attention was handed"
            assert torch.equal(ascending(traced), ascending(done[layer][0])), here


def ascending(positions: Tensor) -> Tensor:
    """Positions [B, H, M] in order, with -1 first and no more columns than the longest head needs."""
    most = int((positions >= 0).sum(-1).max())
    return positions.long().sort(-1).values[..., positions.shape[-1] - most :]

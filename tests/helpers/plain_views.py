"""Methods on views of plain tensors, with no cache behind them: the slots, the chunks and the loop, written as defined.

`run` drives a method over a `Case` of random tensors. The layers that carry out its decisions are either `PlainLayer`,
lists and padded tensors, or `EngineLayer`, the functions that the transformers engine uses.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from plain_slots import PlainChunks, PlainSlots
from torch import Tensor

from foveakv.core.budget import Geometry
from foveakv.core.prompt import IMAGE, PAD, TEXT, PromptMap
from foveakv.engines.transformers import decisions
from foveakv.engines.transformers.slots import StoredSlots
from foveakv.methods import Decision, DecodeView, Method, ModelFacts, PrefillView, PromptEndView, PromptView, ReadView
from foveakv.methods.views import Repeated, ResultView

LAYERS, HEADS, GROUP, DIM = 4, 2, 2, 8
SCALING = DIM**-0.5


@dataclass
class Case:
    """Prompts and decode steps. layers: query [B, Hq, C, D], keys and values [B, H, C, D] of every layer; repeated:
    query and keys of a second pass; steps: the same as `layers` for each step's new tokens."""

    prompt: PromptMap
    layers: list[tuple[Tensor, ...]]
    repeated: list[tuple[Tensor, ...]]
    steps: list[list[tuple[Tensor, ...]]]

    @classmethod
    def of(cls, lengths: dict[int, int], new: tuple[int, ...] = (1,) * 6, dtype: torch.dtype = torch.float64) -> Case:
        """lengths: seed -> tokens of a sequence; shorter ones are padded at the left, with noise."""
        columns = max(lengths.values())
        pads = [columns - length for length in lengths.values()]
        makers = [torch.Generator().manual_seed(seed) for seed in lengths]
        noise = torch.Generator().manual_seed(99)

        def rows(heads: int, tokens: list[int], width: int) -> Tensor:
            own = [torch.randn(heads, n, DIM, generator=g, dtype=dtype) for n, g in zip(tokens, makers, strict=True)]
            fill = [9 * torch.randn(heads, width - n, DIM, generator=noise, dtype=dtype) for n in tokens]
            return torch.stack([torch.cat(pair, 1) for pair in zip(fill, own, strict=True)])

        def layer(tokens: list[int], width: int) -> tuple[Tensor, ...]:
            # sharper queries, so that attention differs between columns
            return (
                2 * rows(HEADS * GROUP, tokens, width),
                rows(HEADS, tokens, width),
                rows(HEADS, tokens, width),
            )

        tokens = list(lengths.values())
        kinds = torch.tensor([
            [PAD] * pad + [IMAGE if 3 <= c < n // 3 or n // 3 + 3 <= c < n - 12 else TEXT for c in range(n)]
            for pad, n in zip(pads, tokens, strict=True)
        ], dtype=torch.int8)  # fmt: skip
        return cls(
            PromptMap(kinds),
            [layer(tokens, columns) for _ in range(LAYERS)],
            [layer(tokens, columns)[:2] for _ in range(LAYERS)],
            [[layer([n] * len(tokens), n) for _ in range(LAYERS)] for n in new],
        )

    @property
    def request(self) -> PromptView:
        """The facts that a method gets about the prompt."""
        itemsize = self.layers[0][1].element_size()
        geometry = Geometry(self.prompt.batch, self.prompt.lengths, LAYERS, HEADS, DIM, DIM, itemsize)
        return PromptView(self.prompt, geometry, tuple(range(LAYERS)), LAYERS)


class PlainLayer:
    """One layer's slots and chunks as plain tensors."""

    def __init__(self, view: PrefillView, decision: Decision) -> None:
        real, shape = view.prompt.real, view.keys.shape[:3]
        keep = real[:, None] if decision.keep is None else decision.keep & real[:, None]
        keys = view.keys if decision.keys is None else decision.keys
        self.chunks: PlainChunks | None = None
        self.slots: Any = PlainSlots(keys, view.positions, keep.expand(shape))
        for name, each in decision.fields.items():
            whole = torch.zeros(shape) if each.values is None else each.values
            values = torch.zeros(*shape[:2], self.slots.max_length, dtype=each.dtype)
            for b, h in torch.cartesian_prod(*map(torch.arange, shape[:2])).tolist():
                kept = whole[b, h, keep.expand(shape)[b, h]]
                values[b, h, : len(kept)] = kept
            self.slots.add_field(name, values)
        self._offload(decision, keys, real, view.positions)

    def _offload(self, decision: Decision, keys: Tensor, real: Tensor, positions: Tensor) -> None:
        if decision.offload is not None and self.chunks is None:
            self.chunks = PlainChunks(decision.offload, keys, real, positions)
        if self.chunks is not None and decision.chunks is not None:
            self.chunks.reserve(decision.chunks)

    def settle(self, decision: Decision, real: Tensor) -> None:
        slots, positions = self.slots, self.slots.positions()
        first = Decision(offload=decision.offload)
        self._offload(first, slots.keys(), slots.valid()[:, 0], positions[:, 0])
        if decision.keep is not None:
            slots.keep(decision.keep.expand(-1, slots.heads, -1).gather(2, positions.clamp_min(0)))
        self._offload(Decision(chunks=decision.chunks), slots.keys(), real, positions)

    def append(self, keys: Tensor, values: Tensor, positions: Tensor) -> None:
        self.slots.append(keys, positions)

    @property
    def choosing(self) -> bool:
        return self.chunks is not None and bool(self.chunks.rows)

    def choose(self, relevance: Tensor) -> None:
        assert self.chunks is not None
        assert relevance.shape[0] == len(self.chunks.rows)
        self.chunks.choose(relevance)

    def evict(self, decision: Decision) -> None:
        if decision.evict is not None:
            self.slots.evict(decision.evict.slots, decision.evict.counts)
        if decision.keep is not None:
            self.slots.keep(decision.keep)

    def attended(self) -> list[list[list[int]]]:
        own = self.slots.positions().tolist()
        return [
            [sorted([p for p in head if p >= 0] + self._chosen(b, h)) for h, head in enumerate(row)]
            for b, row in enumerate(own)
        ]

    def _chosen(self, b: int, h: int) -> list[int]:
        return [] if self.chunks is None else self.chunks.positions(b, h)


class EngineLayer:
    """The same with the functions of the transformers engine."""

    def __init__(self, view: PrefillView, decision: Decision) -> None:
        self.storage = decisions.Storage("plain", "auto", None, 0)
        self.segments, self.chunks = decisions.store_prompt(view, decision, self.storage)

    def settle(self, decision: Decision, real: Tensor) -> None:
        self.chunks = decisions.settle(self.segments, self.chunks, decision, real, self.storage)

    @property
    def slots(self) -> StoredSlots:
        return StoredSlots(self.segments)

    def append(self, keys: Tensor, values: Tensor, positions: Tensor) -> None:
        self.segments.append(keys, values, positions[None])

    @property
    def choosing(self) -> bool:
        return self.chunks is not None and bool(self.chunks.choosing)

    def choose(self, relevance: Tensor) -> None:
        if self.chunks.in_place:
            self.chunks.pick(relevance)
        else:
            self.chunks.fetch(self.segments, relevance)

    def evict(self, decision: Decision) -> None:
        decisions.evict(self.segments, decision, "plain")

    def attended(self) -> list[list[list[int]]]:
        positions = self.segments.positions()
        chosen = None if self.chunks is None else self.chunks.chosen_positions()
        if chosen is not None:
            positions = torch.cat([positions, chosen], -1)
        return [[sorted(p for p in head if p >= 0) for head in row] for row in positions.tolist()]


@dataclass
class Done:
    """What a run gave. attended: for every step and layer, the positions of each sequence and head, ascending; the
    first entry is what stays of the prompt. slots: of every layer, at the end. made: every decision, with the call that
    made it, the layer, and the shape of what it is about."""

    attended: list[list[list[list[list[int]]]]] = field(default_factory=list)
    slots: list[Any] = field(default_factory=list)
    made: list[tuple[str, int, Decision, tuple[int, int, int]]] = field(default_factory=list)
    method: Any = None  # as for a model with these layers
    state: Any = None
    results: Any = None


def run(method: Method, case: Case, make: type[PlainLayer] | type[EngineLayer] = PlainLayer) -> Done:
    """begin, prefill of every layer, after_prefill, then all decode steps."""
    done, request, layers = Done(), case.request, []
    method = method.for_model(ModelFacts(tuple(range(LAYERS)), LAYERS, "plain", lambda: "0" * 64))
    done.method, done.state = method, method.begin(request)
    prompt, index, pruned = case.prompt, torch.arange(case.prompt.columns).expand(case.prompt.kinds.shape), False
    for idx, (query, keys, values) in enumerate(case.layers):
        query, keys, values = (
            t.gather(2, index[:, None, :, None].expand(-1, t.shape[1], -1, DIM)) for t in (query, keys, values)
        )
        before = [t.clone() for t in (query, keys, values)]
        view = PrefillView(
            idx, idx, query, SCALING, request, done.state, keys, values, index, prompt, visible(prompt), pruned
        )
        if method.observes.second_pass:
            view.repeated = Repeated(*case.repeated[idx])
        decision = method.prefill(view) or Decision()
        assert all(map(torch.equal, before, (query, keys, values))), "a view's tensors are not written to"
        done.made.append(("prefill", idx, decision, tuple(keys.shape[:3])))
        layers.append(make(view, decision))
        for number, each in enumerate(decision.earlier or []):
            done.made.append(("earlier", number, each, (case.prompt.batch, HEADS, case.prompt.columns)))
            layers[number].settle(each, case.prompt.real)
        if decision.stream is not None:
            assert method.prunes_after == idx
            prompt, index, pruned = shortened(case.prompt, decision.stream)
    taken = method.after_prefill(PromptEndView(request, done.state))
    for idx, (layer, decision) in enumerate(zip(layers, taken or [Decision()] * LAYERS, strict=True)):
        done.made.append(("after_prefill", idx, decision, (case.prompt.batch, HEADS, case.prompt.columns)))
        layer.settle(decision, case.prompt.real)
    done.attended.append([layer.attended() for layer in layers])
    seen = case.prompt.columns
    for step in case.steps:
        new = step[0][0].shape[2]
        seen += new
        done.attended.append([])
        for idx, (layer, (query, keys, values)) in enumerate(zip(layers, step, strict=True)):
            layer.append(keys, values, torch.arange(seen - new, seen))
            shared = idx, idx, query, SCALING, request, done.state
            if layer.choosing:
                layer.choose(method.read(ReadView(*shared, layer.chunks, seen)))
            done.attended[-1].append(layer.attended())
            observes = method.observes
            if method.evicts_while_decoding or observes.attention_sum or observes.steps:
                sums = attention_sum(layer.slots, query, seen) if observes.attention_sum else None
                slots = layer.slots
                decision = method.decode(DecodeView(*shared, slots, seen, sums))
                if decision is not None:
                    shape = slots.batch, slots.heads, slots.max_length
                    done.made.append(("decode", idx, decision, shape))
                    layer.evict(decision)
    done.slots = [layer.slots for layer in layers]
    done.results = method.results(ResultView(request, done.state))
    return done


def visible(prompt: PromptMap) -> Any:
    """The mask of some rows: causal, without padding; None where nothing is padded."""
    if bool(prompt.real.all()):
        return None
    columns = torch.arange(prompt.columns)

    def rows(which: Tensor) -> Tensor:
        return ((columns <= which[..., None]) & prompt.real[:, None])[:, None]

    return rows


def shortened(prompt: PromptMap, stream: Tensor) -> tuple[PromptMap, Tensor, bool]:
    """The prompt, its columns, and that tokens have left, for the layers after those that stay bool [B, C]."""
    stays = stream & prompt.real
    stays[:, -1] = True  # padding is at the left: the last token is the last column
    width = int(stays.sum(-1).max())
    index = stays.to(torch.int8).argsort(dim=-1, stable=True)[:, prompt.columns - width :]
    return prompt.take(index, stays.gather(1, index)), index, True


def attention_sum(slots: Any, query: Tensor, seen: int) -> Tensor:
    """What every slot receives from the new tokens: [B, H, M]."""
    keys, positions = slots.keys(), slots.positions()
    new = torch.arange(seen - query.shape[2], seen)
    logits = query.unflatten(1, (HEADS, GROUP)) @ keys[:, :, None].mT * SCALING  # [B, H, G, q, M]
    hidden = (positions[:, :, None] > new[:, None]) | (positions < 0)[:, :, None]
    return logits.masked_fill(hidden[:, :, None], -torch.inf).softmax(-1).sum((2, 3))

"""Further blocks of a context: later turns, chunks of a prompt, groups of frames.

A block's queries attend to what is stored and causally to the block (`CompressedLayer.attend`). Then the method decides
over the union of both, in the columns of a `PrefillView`, and the decision is carried out on the stored slots.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from foveakv.core.prompt import PromptMap
from foveakv.engines.transformers.decision_checks import (
    check_complete,
    check_earlier,
    check_further,
    check_keep,
    check_prefill,
    returned,
)
from foveakv.engines.transformers.decisions import check_finite, offload_further, reserve
from foveakv.engines.transformers.masks import Mask
from foveakv.kernels import fused_columns
from foveakv.memory.chunk_growth import withdraw
from foveakv.memory.segments import Segments
from foveakv.methods.views import Decision, Offload, PrefillView, PromptView

Kind = Literal["turn", "chunk", "feed"]
Mode = Literal["context", "block", "keep"]


@dataclass(frozen=True)
class Reads:
    """What a forward pass reads: a block of this kind.

    total: columns at which the prompt or turn is complete that the block is a part of; None: with the block. began:
    column at which it began; for "turn", what is before it belongs to earlier turns.
    """

    kind: Kind
    total: int | None
    began: int = 0


@dataclass
class Block:
    """A further block while it is read.

    Attributes:
        kind: a later "turn" (or a chunk of one), a "chunk" of the first prompt, or what was fed ("feed").
        mode: what is decided over: the stored slots and the block ("context"), the "block" alone, or nothing ("keep").
        start: its first column; columns from here on are the block's.
        context: map of the whole context, the block included.
        request: what the method sees of it; None with mode "keep".
        protected: bool [B, context columns], tokens of earlier blocks that stay; None: there are none.
        columns: for every layer that has decided, the columns of its view: int64 [B, C], -1 before the first.
        chunks: for every layer that has decided, the offloaded chunks that its heads read before, int64 [B, H].
        evicted: slots evicted by it, over all layers.
    """

    kind: Kind
    mode: Mode
    start: int
    context: PromptMap
    request: PromptView | None = None
    protected: Tensor | None = None
    columns: list[Tensor] = field(default_factory=list)
    chunks: list[Tensor | None] = field(default_factory=list)
    evicted: int = 0

    @property
    def new(self) -> int:
        """Columns of the block, q."""
        return self.context.columns - self.start


@dataclass(frozen=True)
class BlockReport:
    """What was stored of a block, and of all before it.

    kind: "prompt", "turn", "chunk" or "feed". decided: "context", "block" or "keep", see `Method.further`. tokens: of
    the block, over all sequences. stored_slots, stored_bytes: of the cache after it. evicted: slots that it evicted.
    peak_bytes: highest bytes while it was read.
    """

    kind: str
    decided: str
    tokens: int
    stored_slots: int
    evicted: int
    stored_bytes: int
    peak_bytes: int


@dataclass
class Union:
    """The columns over which a layer decides: tokens that any head stores, ascending, then the block.

    columns: int64 [B, C], -1 where a sequence has fewer (on the left). slot: int64 [B, H, C], the slot in which a head
    stores a column, -1 where it does not. held: bool [B, H, C], stored and not padding.
    """

    columns: Tensor
    slot: Tensor
    held: Tensor

    @classmethod
    def of(cls, segments: Segments, block: Block) -> Union:
        """The union for a block whose tokens have been appended to a layer's segments."""
        positions = segments.positions()  # [B, H, M]
        batch, heads, length = positions.shape
        width, first = block.context.columns, 0 if block.mode == "context" else block.start
        index = torch.where(positions >= first, positions, width)
        marks = torch.zeros(batch, width + 1, dtype=torch.bool, device=positions.device)
        marks.scatter_(1, index.flatten(1), True)
        marks[:, block.start : width] = True  # all of the block, so that it is the last columns of every sequence
        marks = marks[:, :width]
        counts = marks.sum(-1)
        total = int(counts.max())
        place = marks.cumsum(-1) - 1 + (total - counts)[:, None]  # column of the union, where marked
        row, column = marks.nonzero(as_tuple=True)
        columns = torch.full((batch, total), -1, dtype=torch.int64, device=positions.device)
        columns[row, place[row, column]] = column
        target = torch.nn.functional.pad(place, (0, 1), value=total).gather(1, index.flatten(1))
        slot = torch.full((batch, heads, total + 1), -1, dtype=torch.int64, device=positions.device)
        number = torch.arange(length, device=positions.device).expand(batch, heads, length)
        slot.scatter_(2, target.view(batch, heads, length), number)
        slot = slot[..., :total]
        real = block.context.real.gather(1, columns.clamp_min(0)) & (columns >= 0)
        return cls(columns, slot, (slot >= 0) & real[:, None])

    def gather(self, padded: Tensor) -> Tensor:
        """Values per slot [B, H, M, ...] by column [B, H, C, ...], 0 where a head does not store the column."""
        length, total = padded.shape[2], self.slot.shape[2]
        missing = self.slot < 0
        if length == total and bool((self.slot == torch.arange(total, device=self.slot.device)).all()):
            return padded
        index, rest = self.slot.clamp_min(0), padded.dim() - 3
        index = index.view(*index.shape, *[1] * rest).expand(*index.shape, *padded.shape[3:])
        return padded.gather(2, index).masked_fill_(missing.view(*missing.shape, *[1] * rest), 0)

    def visible(self, mask: Mask | None, prompt: PromptMap) -> Any:
        """The attention mask of rows of the block over these columns, as `PrefillView.visible`."""
        columns, held = self.columns.clamp_min(0), self.held
        same = bool((held == held[:, :1]).all())
        if same and (mask is None or mask.plain) and bool(held.all()):
            return None
        whole = mask is None or mask.plain

        def visible(rows: Tensor) -> Tensor:
            """bool [B, 1 or H, n, C] for the query rows `rows` [B, n]."""
            queries = columns.gather(1, rows)[:, :, None]
            if whole:
                allowed = columns[:, None] <= queries
            else:
                batch = torch.arange(len(rows), device=rows.device)[:, None, None]
                allowed = mask.allowed(batch, queries, columns[:, None])  # type: ignore[union-attr]
            return allowed[:, None] & (held[:, :1] if same else held)[:, :, None]

        return visible


def end_layer(layer: Any, query: Tensor, mask: Mask | None, scaling: float) -> None:
    """Let the method decide about one layer after its attention to the block, query [B, Hq, q, D]; carry it out."""
    cache, segments = layer.cache, layer.segments
    block: Block = cache.block
    block.chunks.append(None if layer.store is None else withdraw(layer.store, segments))
    union = Union.of(segments, block)
    prompt = block.context.take(union.columns.clamp_min(0), union.columns >= 0)
    keys, values = (union.gather(padded) for padded in segments.gather())
    candidates = union.held
    if block.protected is not None:
        candidates = candidates & ~_protected(block.protected, union.columns)[:, None]
    names = segments.field_names
    visible = union.visible(mask, prompt)
    shared: tuple[int, int, Tensor, float, PromptView, Any] = layer.shared(query.detach(), scaling)
    view = PrefillView(
        *shared, keys, values, union.columns.clamp_min(0), prompt, visible,
        fused=fused_columns(keys, cache.backend) if visible is None else None,
        stored=candidates if block.mode == "context" or block.protected is not None else None,
        block_start=union.columns.shape[1] - block.new,
        fields={name: union.gather(segments.field(name)) for name in names},
    )  # fmt: skip
    if cache.method.observes.queries != "none" and layer is cache.compressed[-1]:
        check_finite(view)
    decision = returned(cache.method, "prefill", cache.method.prefill(view))
    made = (decision.keep, decision.keys, decision.values, *(each.values for each in decision.fields.values()))
    work = (keys, values, *vars(union).values(), *view.fields.values(), candidates, view.positions, *made)
    cache.note_peak(sum(each.nbytes for each in work if each is not None))
    check_prefill(cache.method.name, decision, view)
    check_further(cache.method.name, decision, segments.batch, segments.heads)
    kept = []
    if decision.earlier is not None:
        done = cache.compressed[: layer.compressed_idx]
        shapes = [(len(each), layer.segments.heads, each.shape[1]) for each in block.columns]
        kept = check_earlier(cache.method.name, decision.earlier, shapes)
        for before, keep in zip(done, kept, strict=True):
            _keep(before, block, keep)
    block.columns.append(union.columns)
    _replace(segments, union, view, decision)
    for name, each in decision.fields.items():
        _set_field(segments, union, name, each)
    if decision.offload is not None:
        _offload(layer, block, decision.offload, keys, values, candidates, view.positions)
    _keep(layer, block, decision.keep if decision.keep is None else decision.keep & candidates)
    segments.in_token_order()
    if layer.store is not None and decision.chunks is not None:
        reserve(segments, layer.store, decision.chunks, cache.storage)
    cache.end_layer(layer)


def settle(layer: Any, block: Block, decision: Decision) -> None:
    """Carry out one layer's decision from `after_prefill`; its masks are over the columns of the layer's view."""
    method, columns, segments = layer.cache.method.name, block.columns[layer.compressed_idx], layer.segments
    check_further(method, decision, segments.batch, segments.heads)
    check_keep(method, decision.keep, (segments.batch, segments.heads, columns.shape[1]))
    if decision.offload is not None:
        positions = segments.positions()
        stored = positions >= (block.start if block.mode == "block" else 0)
        if block.protected is not None:
            stored &= ~block.protected.gather(1, positions.clamp_min(0).flatten(1)).view_as(positions)
        keys, values = segments.gather()
        _offload(layer, block, decision.offload, keys, values, stored, positions)
    _keep(layer, block, decision.keep)
    former = block.chunks[layer.compressed_idx]
    if layer.store is None:
        check_complete(method, decision, layer.store)
    elif decision.chunks is not None or not layer.store.reserved:
        chunks = decision.chunks if decision.chunks is not None else former
        if chunks is None:
            check_complete(method, decision, layer.store)
        reserve(segments, layer.store, chunks, layer.cache.storage)


def _offload(
    layer: Any, block: Block, offload: Offload, keys: Tensor, values: Tensor, stored: Tensor, positions: Tensor
) -> None:
    """Move complete chunks of what heads store, bool [B, H, C], to the layer's store; `keep` evicts their slots."""
    name = layer.cache.method.name
    layer.store, moved = offload_further(layer.store, offload, keys, values, stored, positions, name)
    layer.counts.evicted -= moved  # `keep` counts them
    block.evicted -= moved


def _protected(protected: Tensor, columns: Tensor) -> Tensor:
    """Whether columns [B, n] of the context are of tokens that stay: bool [B, n]."""
    return protected.gather(1, columns.clamp_min(0)) & (columns >= 0)


def _keep(layer: Any, block: Block, keep: Tensor | None) -> None:
    """Evict slots of a layer; keep: bool [B, H or 1, C] over the columns of its view, None = all but padding."""
    segments: Segments = layer.segments
    positions, columns = segments.positions(), block.columns[layer.compressed_idx]
    batch, heads = positions.shape[:2]
    flat = positions.clamp_min(0).flatten(1)
    stays = block.context.real.gather(1, flat).view_as(positions) & (positions >= 0)
    before = int(stays.sum())
    if keep is not None:
        place = torch.searchsorted(columns, flat).clamp_max(columns.shape[1] - 1).view_as(positions)
        told = keep.to(positions.device).expand(batch, heads, -1).gather(2, place)
        if block.mode == "block":
            told = told | (positions < block.start)
        if block.protected is not None:
            told = told | block.protected.gather(1, flat).view_as(positions)
        stays = stays & told
    segments.keep(stays)
    gone = before - segments.total
    layer.counts.evicted += gone
    block.evicted += gone


def _replace(segments: Segments, union: Union, view: PrefillView, decision: Decision) -> None:
    """Overwrite the slots whose keys or values the decision replaces."""
    if decision.keys is None and decision.values is None:
        return
    keys = view.keys if decision.keys is None else decision.keys
    values = view.values if decision.values is None else decision.values
    changed = union.held & ((keys != view.keys).any(-1) | (values != view.values).any(-1))
    b, h, column = changed.nonzero(as_tuple=True)
    segments.write(
        b * segments.heads + h, union.slot[b, h, column], keys[b, h, column], values[b, h, column],
        union.columns[b, column],
    )  # fmt: skip


def _set_field(segments: Segments, union: Union, name: str, made: Any) -> None:
    """Give a field the decision's values; without values, slots keep theirs and those of the block start at 0."""
    if name not in segments.field_names:
        segments.add_field(name, dtype=made.dtype)
    if made.values is None:
        return
    padded = segments.field(name)
    b, h, column = union.held.nonzero(as_tuple=True)
    padded[b, h, union.slot[b, h, column]] = made.values[b, h, column].to(padded.dtype)
    segments.set_field(name, padded)

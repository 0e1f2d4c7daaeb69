"""Decode eviction with a recycle bin: DDES of HAE (arXiv 2602.02197), and H2O as a bin of one token.

Notation: B sequences, H KV heads, M most slots that a head stores, C prompt columns, l the steady size, D the capacity
of the bin.

Every stored slot has a score, its cumulative attention (Eq. 5): the sum of the attention it received from every query
since it was added. Slots beyond l are marked, one per step, and are still stored and attended to. When D slots are
marked, D slots are evicted at once.

With `BinLayer.prompt`, candidates are the tokens of the prompt only, as long as it has enough of them; from then on
every token is a candidate.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import sub

import torch
from torch import Tensor

from foveakv.core.selection import keep_top
from foveakv.errors import MethodError
from foveakv.methods import checks
from foveakv.methods.ranking import lowest, mark_highest, rank_of
from foveakv.methods.views import Decision, DecodeView, Evict, Field, PrefillView, Slots, State

# Per-slot fields: cumulative attention, in the bin or not, steps among the most attended, steps since it was added.
SCORE, MARKED, USES, AGE = "score", "marked", "uses", "age"
_OPEN = 2**62  # in `BinLayer.prompt`: every token is a candidate
MOST_ATTENDED = 0.1  # share of the slots that count as "used" in a step; not stated in the paper


@dataclass
class BinLayer(State):
    """Recycle bin of one layer.

    steady: l, tokens per head. recent: newest tokens that are never candidates. marked: tokens in the bin. prompt:
    stored slots of the prompt, where only they are candidates; None = every token is one. All four are int64 [B] on the
    CPU, like the lengths that they are compared with. since: tokens seen when slots were first moved.
    last_sink [B, H, 1], newest [B, H, n]: positions, see `RecycleBin._look_up_protected`.
    """

    steady: Tensor
    recent: Tensor
    marked: Tensor
    prompt: Tensor | None = None
    since: int | None = None
    last_sink: Tensor | None = None
    newest: Tensor | None = None
    skipped: int = 0  # leading entries of `newest` that are omitted because no sequence has them


@dataclass
class BinState(State):
    """Recycle bins of all layers.

    peak: the most tokens that a head stored. evicted_decode: slots evicted while decoding.
    """

    layers: list[BinLayer] = field(default_factory=list)
    peak: int = 0
    evicted_decode: int = 0

    def add_layer(self, steady: Tensor, recent: Tensor, prompt: Tensor | None = None) -> None:
        """Add an empty bin for the next layer; steady, recent, prompt: int64 [B], see `BinLayer`."""
        sizes = steady.cpu().clone(), recent.cpu().clone()
        own = None if prompt is None else prompt.cpu().clone()
        self.layers.append(BinLayer(*sizes, torch.zeros_like(sizes[0]), own))

    def emptied(self) -> BinState:
        """Return it without layers, for the next block."""
        return BinState([], self.peak, self.evicted_decode)

    def figures(self) -> dict[str, object]:
        """Return plain values for reports; empty before the first layer has been added."""
        if not self.layers:
            return {}
        steady = self.layers[0].steady.tolist()
        return {"steady": steady, "peak": self.peak, "evicted_decode": self.evicted_decode}


@dataclass(frozen=True)
class RecycleBin:
    """Eviction rules of a recycle bin. They act on a `BinState` and on per-slot fields of the stored slots.

    Args:
        size: D.
        mode: "rerank" ranks all candidates at the flush (Eq. 4); "mark" flushes the marked tokens (Fig. 1).
        restore: in mode "mark", a marked token is restored when its score is above that of the lowest unmarked one.
        score: "attention" (Eq. 5) or "frequency+importance", the mean of two ranks with weight `frequency_weight`.
        frequency_weight: weight of the frequency rank, between 0 and 1.
        per_head: rank tokens per KV head; False sums scores over heads, so that all heads evict the same tokens.
        sink: number of oldest tokens that are never candidates.
    """

    size: int = 1
    mode: str = "rerank"
    restore: bool = True
    score: str = "attention"
    frequency_weight: float = 0.5
    per_head: bool = False
    sink: int = 0

    def validate(self, name: str) -> None:
        """Raise `MethodError` unless all settings are valid. name: name of the method, for messages."""
        checks.whole_number(name, "recycle_bin_size", self.size, 1, "1 evicts in every step")
        checks.choice(name, "mode", self.mode, ("rerank", "mark"))
        checks.flag(name, "restore", self.restore)
        checks.choice(name, "score", self.score, ("attention", "frequency+importance"))
        checks.share(name, "frequency_weight", self.frequency_weight)
        checks.flag(name, "per_head_scores", self.per_head)
        checks.whole_number(name, "sink", self.sink, 0, "oldest tokens that are always kept")

    # ---- prefill

    def shrink(self, sums: Tensor, keep: Tensor, steady: Tensor, recent: Tensor) -> Tensor:
        """Select the columns of a prompt to keep, at most the steady size, by their prefill scores.

        Args:
            sums: [B, H, C], see `prompt_scores`.
            keep: bool [B, H, C], columns that may be kept.
            steady, recent: int64 [B].

        Returns:
            bool [B, H, C], a subset of `keep` with at most `steady[b]` columns per head.
        """
        rank = sums if self.per_head else sums.sum(1, keepdim=True).expand_as(sums)
        place = keep.cumsum(-1)
        total = place[..., -1:]
        safe = (place <= self.sink) | (place > total - recent.to(keep.device)[:, None, None])
        rank = rank.masked_fill(safe, torch.inf).masked_fill(~keep, -torch.inf)
        return keep_top(rank, steady.to(keep.device)[:, None])

    def fields(self, sums: Tensor) -> dict[str, Field]:
        """Return the values of the per-slot fields after a prompt or block; sums: [B, H, C], see `accumulated`.

        No slot is marked, since none is stored beyond l. Steps count as before, and the block is none.
        """
        found = {SCORE: Field(sums, sums.dtype)}
        if self.size > 1:
            found[MARKED] = Field(torch.zeros_like(sums, dtype=torch.bool), torch.bool)
        if self.score != "attention":
            found[USES], found[AGE] = Field(dtype=torch.int32), Field(dtype=torch.int32)
        return found

    # ---- decoding

    def step(self, view: DecodeView, state: BinState) -> Decision | None:
        """Add the attention of this step (Eq. 5), mark slots over the steady size, and flush a full bin.

        Afterwards every sequence stores l <= tokens < l + D (fewer than l only until it has grown to l). A step of q
        tokens flushes floor((tokens - l) / D) * D tokens at once.

        Returns:
            The evictions: single slots if D = 1, where every step evicts; a mask of the slots to keep when a bin is
            flushed; otherwise None.

        Raises:
            MethodError: the view has no attention sum.
        """
        slots, layer, attention_sum = view.slots, state.layers[view.compressed_idx], view.attention_sum
        if attention_sum is None:
            raise MethodError("a recycle bin needs the attention of each step: set attention_sum=True in `observes`")
        # All heads of a layer store the same number of tokens.
        sizes = zip(slots.sequence_lengths, layer.steady.tolist(), strict=True)
        over = [max(0, length - steady) for length, steady in sizes]
        self._open(slots, layer, over)
        if self.size == 1 and layer.since is None and any(over):  # nothing has been moved so far
            self._look_up_protected(view, layer)
        evict = [count // self.size * self.size for count in over]
        state.peak = max(state.peak, slots.max_length)
        state.evicted_decode += sum(evict) * slots.heads
        decision = self._decide(view, layer, over, evict, attention_sum)
        if layer.prompt is not None and any(evict):
            layer.prompt = layer.prompt - torch.tensor(evict)
        return decision

    def _decide(
        self, view: DecodeView, layer: BinLayer, over: list[int], evict: list[int], attention_sum: Tensor
    ) -> Decision | None:
        slots, flushes = view.slots, sum(evict) // self.size
        if self._one_each(layer, over, evict):
            found = self._add_and_find(view, layer, attention_sum, over, evict)
            if found is not None:
                return Decision(evict=Evict(found, evict), flushes=flushes) if self.size == 1 else None
        slots.add(SCORE, attention_sum)
        if self.score != "attention":
            self._count_uses(view, attention_sum)
        if not any(over):
            return None
        if self.size == 1:
            positions = slots.positions()
            victims = lowest(self._order(view, layer, positions), evict, positions)
            return Decision(evict=Evict(victims, evict), flushes=flushes)
        if any(evict):
            return self._flush(view, layer, over, evict, flushes)
        self._mark(view, layer, over)
        return None

    def _open(self, slots: Slots, layer: BinLayer, over: list[int]) -> None:
        """Make every token a candidate in sequences whose prompt has fewer candidates than the bin needs."""
        if layer.prompt is None or not any(over):
            return
        lengths = torch.tensor(slots.sequence_lengths)
        room = torch.minimum(layer.prompt, lengths - layer.recent) - self.sink
        layer.prompt = layer.prompt.masked_fill(room < torch.tensor(over), _OPEN)

    def _one_each(self, layer: BinLayer, over: list[int], evict: list[int]) -> bool:
        """Whether this step selects at most one token per sequence, by scores alone (the common case)."""
        if self.score != "attention" or not any(over):
            return False
        if self.size == 1:
            return max(evict) == 1
        return not any(evict) and max(map(sub, over, layer.marked.tolist())) == 1

    def _add_and_find(
        self, view: DecodeView, layer: BinLayer, attention_sum: Tensor, over: list[int], evict: list[int]
    ) -> Tensor | None:
        """Add the attention of the step and find (if D > 1, mark) the lowest slot in one pass: int64 [B, H or 1, 1].

        Equivalent to `Slots.add` and `lowest` or `_mark`; sums over 16 or more heads may differ in the last bit. None
        if the fused pass is not available.
        """
        slots = view.slots
        groups = slots.heads if self.per_head else 1
        if self.size == 1:
            wanted = evict
            first, end = self._positions_between(view, layer, groups)
        else:
            wanted = list(map(sub, over, layer.marked.tolist()))
            ends = map(sub, slots.sequence_lengths, layer.recent.tolist())
            if layer.prompt is not None:
                ends = map(min, ends, layer.prompt.tolist())
            first, end = [self.sink] * (len(over) * groups), [limit for limit in ends for _ in range(groups)]
        end = [limit if wanted[i // groups] else 0 for i, limit in enumerate(end)]
        found = slots.add_and_find(
            SCORE, attention_sum, first, end, per_head=self.per_head, by_position=self.size == 1,
            mark=None if self.size == 1 else MARKED,
        )  # fmt: skip
        if found is not None and self.size > 1:
            layer.marked = torch.tensor(over)
        return found

    def _positions_between(self, view: DecodeView, layer: BinLayer, groups: int) -> tuple[list[int], list[int]]:
        """Return the range of candidate positions, lower bound (inclusive) and upper bound: [B * groups] each."""
        batch = view.slots.batch
        first = [0] * (batch * groups)
        if layer.last_sink is not None:
            first = (layer.last_sink[:, :groups] + 1).flatten().tolist()
        recent = layer.recent.tolist()
        end = self._first_recent(view, layer, recent) if any(recent) else view.seen
        ends = end.expand(batch, groups, 1).flatten().tolist() if isinstance(end, Tensor) else [end] * (batch * groups)
        if layer.prompt is not None:
            columns = view.request.prompt.columns
            limits = [view.seen if left >= _OPEN // 2 else columns for left in layer.prompt.tolist()]
            ends = [min(limits[i // groups], each) for i, each in enumerate(ends)]
        return first, ends

    def _mark(self, view: DecodeView, layer: BinLayer, over: list[int]) -> None:
        """Mark the lowest unmarked tokens until `over` [B] tokens are in the bin."""
        new = [count - marked for count, marked in zip(over, layer.marked.tolist(), strict=True)]
        if any(new):
            order = self._order(view, layer)
            marked = view.slots.field(MARKED)[:, : order.shape[1]]
            view.slots.put(MARKED, lowest(order.masked_fill(marked, torch.inf), new), new, True)
        layer.marked = torch.tensor(over)

    def _flush(self, view: DecodeView, layer: BinLayer, over: list[int], evict: list[int], flushes: int) -> Decision:
        """Evict `evict` [B] tokens: the marked ones, or those with the lowest scores of all candidates."""
        slots, restored_slots = view.slots, 0
        order = -self._order(view, layer)  # the highest is evicted first
        marked = slots.field(MARKED)[:, : order.shape[1]]
        new = [count - was for count, was in zip(over, layer.marked.tolist(), strict=True)]
        marked = marked | mark_highest(order.masked_fill(marked, -torch.inf), new)
        left = [count - gone for count, gone in zip(over, evict, strict=True)]
        if self.mode == "mark" and not self.restore:
            victims = mark_highest(order.masked_fill(~marked, -torch.inf), evict)
            marked = marked & ~victims
        else:
            # Marked tokens that score above the lowest unmarked one swap places with it. Flushed tokens are then the
            # lowest of all candidates, so "mark" with restore=True and "rerank" evict the same tokens.
            victims = mark_highest(order, evict)
            again = mark_highest(order.masked_fill(victims, -torch.inf), left)
            flushing = torch.tensor([count > 0 for count in evict], device=order.device)[:, None, None]
            restored = marked & ~victims & ~again & flushing
            restored_slots = int(restored.sum()) * (1 if self.per_head else slots.heads)
            marked = torch.where(flushing, again, marked)
        layer.marked = torch.tensor(left)
        slots.set_field(MARKED, marked.expand(-1, slots.heads, -1))
        return Decision(keep=~victims.expand(-1, slots.heads, -1), restored=restored_slots, flushes=flushes)

    def _order(self, view: DecodeView, layer: BinLayer, positions: Tensor | None = None) -> Tensor:
        """Return the ranking values [B, H or 1, M], read-only: the lowest is evicted first, inf never.

        positions: [B, H, M] if slots may be stored in any order; None if they are stored in the order of tokens.
        """
        order = self._values(view)
        slots = view.slots
        recent, ragged = layer.recent.tolist(), not slots.uniform
        protected = None
        if positions is None:
            if ragged or self.sink or any(recent) or layer.prompt is not None:
                number = torch.arange(slots.max_length, device=order.device)
                end = slots.lengths[:, 0] - layer.recent
                if layer.prompt is not None:
                    end = torch.minimum(end, layer.prompt)
                end = end.to(order.device)[:, None, None]
                protected = (number < self.sink) | (number >= end)
        else:
            positions = positions[:, : order.shape[1]]
            if ragged or self.sink:
                protected = positions <= (-1 if layer.last_sink is None else layer.last_sink[:, : order.shape[1]])
            if any(recent):
                newest = positions >= self._first_recent(view, layer, recent)
                protected = newest if protected is None else protected | newest
            if layer.prompt is not None:
                closed = (layer.prompt < _OPEN // 2).to(order.device)[:, None, None]
                decoded = closed & (positions >= view.request.prompt.columns)
                protected = decoded if protected is None else protected | decoded
        return order if protected is None else order.masked_fill(protected, torch.inf)

    def _look_up_protected(self, view: DecodeView, layer: BinLayer) -> None:
        """Record the positions of sink tokens and newest tokens before slots are moved for the first time.

        From then on both are identified by position. The newest tokens are those from position `seen` - `recent` on,
        except if the last stored prompt tokens are not consecutive; their positions are then recorded until `recent`
        tokens have been decoded.
        """
        slots, device = view.slots, view.slots.device
        positions, lengths = slots.positions(), slots.lengths[:, 0]
        layer.since = view.seen
        if self.sink:
            at = positions[..., : self.sink]
            last = at[..., -1:] if at.shape[-1] == self.sink else at.new_zeros(*at.shape[:2], 1)
            missing = (self.sink - lengths).to(device, positions.dtype)[:, None, None]  # sinks that are not decoded yet
            layer.last_sink = torch.where(missing > 0, view.seen + missing - 1, last)
        most = int(layer.recent.max())
        if most:
            # A sequence with fewer than `recent` stored tokens protects all of them.
            layer.skipped = max(0, int((layer.recent - lengths).min()))
            recent = layer.recent.to(device)[:, None, None]
            number = torch.arange(layer.skipped, most, device=device)
            slot = lengths.to(device)[:, None, None] - recent + number
            slot = torch.where(number < recent, slot, -1).expand(-1, slots.heads, -1)
            newest = positions.gather(-1, slot.clamp(0, slots.max_length - 1)).masked_fill(slot < 0, -1)
            consecutive = (view.seen - recent + number).clamp_min(-1)
            if not bool(((newest == consecutive) | (number >= recent)).all()):
                layer.newest = newest

    def _first_recent(self, view: DecodeView, layer: BinLayer, recent: list[int]) -> Tensor | int:
        """Return the lowest position that is protected as recent: one for all sequences, or [B, H or 1, 1]."""
        device, newest = view.slots.device, layer.newest
        if newest is None:
            first = [view.seen - count for count in recent]
            return first[0] if len(set(first)) == 1 else torch.tensor(first, device=device)[:, None, None]
        passed = view.seen - (layer.since or 0)
        decoded = torch.tensor(recent, device=device)[:, None, None]
        if passed >= max(recent):
            layer.newest = None
            return self._first_recent(view, layer, recent)
        heads = newest.shape[1] if self.per_head else 1
        at = passed - layer.skipped
        remembered = newest[:, :heads, at : at + 1] if at >= 0 else newest.new_full((1, 1, 1), -1)
        return torch.where(passed < decoded, remembered, view.seen - decoded)

    def _count_uses(self, view: DecodeView, attention_sum: Tensor) -> None:
        """Increment the age of every slot and the uses of the most attended tenth (ties at its end included)."""
        slots = view.slots
        pooled = attention_sum if self.per_head else attention_sum.sum(1, keepdim=True)
        tenth = (slots.lengths[:, : pooled.shape[1]] * MOST_ATTENDED).ceil().to(torch.long)
        best = pooled.topk(int(tenth.max()), dim=-1).values
        least = best.gather(-1, (tenth - 1).to(attention_sum.device)[..., None])
        slots.set_field(USES, slots.field(USES) + ((pooled >= least) & (pooled > 0)))
        slots.set_field(AGE, slots.field(AGE) + 1)

    def _values(self, view: DecodeView) -> Tensor:
        """Return the cumulative attention, or the mean of two ranks: [B, H or 1, M], read-only."""
        score = view.slots.field(SCORE)
        value = score if self.per_head else score.sum(1, keepdim=True)
        if self.score == "attention":
            return value
        slots, heads = view.slots, value.shape[1]
        valid = slots.valid()[:, :heads]
        frequency = slots.field(USES)[:, :heads] / slots.field(AGE)[:, :heads].clamp_min(1)
        weight = self.frequency_weight
        return weight * rank_of(frequency.to(value.dtype), valid) + (1 - weight) * rank_of(value, valid)


def accumulated(view: PrefillView, sums: Tensor) -> Tensor:
    """Add the attention from a block's queries, [B, H, C], to what stored slots have accumulated before it."""
    before = view.fields.get(SCORE)
    return sums if before is None else sums + before.to(sums.dtype)

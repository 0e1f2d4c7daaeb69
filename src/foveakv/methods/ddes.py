"""Eviction while decoding with a recycle bin: HAE's DDES (arXiv 2602.02197), and H2O as a bin of one token.

Notation: B sequences, H KV heads, M the longest run, C prompt columns, l the steady size, D the bin's capacity.

Every stored slot carries its cumulative attention, Eq. 5: the sum of the attention it got from every query since it
entered. Slots beyond l are marked, one per step, and stay stored and attended to; when D are marked, D leave at once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Integral
from operator import sub
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from foveakv.core import attention_stats as scores
from foveakv.core.columns import real_first
from foveakv.errors import MethodError
from foveakv.kernels import cpu_scores
from foveakv.methods import checks
from foveakv.methods.base import DecodeView, Drop, PrefillView, keep_top

if TYPE_CHECKING:
    from foveakv.engines.transformers.cache import CompressedCache

# Per-slot fields: cumulative attention, in the bin or not, steps among the most attended, steps since entry.
SCORE, MARKED, USES, AGE = "score", "marked", "uses", "age"
MOST_ATTENDED = 0.1  # share of the slots that counts as "used" in a step; not stated in the paper


def prompt_scores(view: PrefillView, rows: Literal["all"] | int) -> Tensor:
    """Attention that every prompt column got from the prompt's queries, summed over the query group: [B, H, C].

    Whether the prompt's queries count in Eq. 5 is not stated in the paper; we count them. `rows="all"` is exact. With
    a number (ours), a quarter of the rows are the last ones and the others, evenly spaced, stand for all earlier ones.
    """
    real = view.prompt.real
    lengths = real.sum(-1)
    order = real_first(real)
    width = int(lengths.max())
    if rows == "all" or rows >= width:
        return _sums(view, order[:, :width], torch.arange(width, device=real.device) < lengths[:, None])
    last = max(rows // 4, 1)
    early = rows - last
    # Rows of one sequence, by number: `early` of the first T - last, then the last ones.
    before = (lengths - last).clamp_min(0)[:, None]
    steps = torch.arange(early, device=real.device)
    spread = (steps * before) // max(early, 1)  # distinct while before >= early, else some repeat
    distinct = torch.cat([torch.ones_like(before, dtype=torch.bool), spread[:, 1:] != spread[:, :-1]], -1)[:, :early]
    distinct = distinct & (spread < before)
    tail = lengths[:, None] - 1 - torch.arange(last, device=real.device)
    sums = _sums(view, order.gather(1, tail.clamp_min(0)), tail >= 0)
    if early == 0:
        return sums
    weight = before / distinct.sum(-1, keepdim=True).clamp_min(1)
    return sums + weight[:, :, None] * _sums(view, order.gather(1, spread), distinct)


def _sums(view: PrefillView, rows: Tensor, valid: Tensor) -> Tensor:
    return scores.column_sums(view.query, view.keys, rows, valid, view.scaling, view.visible)


@dataclass(frozen=True)
class RecycleBin:
    """The rules; what they act on lives in the layer (`state`, and one value per slot in its segments).

    size: D. mode: "rerank" ranks all candidates at the flush (Eq. 4), "mark" flushes what was marked (Fig. 1).
    restore: in mode "mark", a marked token leaves the bin when its score is above the lowest unmarked one's.
    score: "attention" (Eq. 5) or "frequency+importance", the mean of two ranks with weight `frequency_weight`.
    per_head: every KV head ranks for itself; otherwise scores are summed over heads, and all heads drop the same.
    sink: so many of the oldest tokens are never candidates.
    """

    size: int = 1
    mode: str = "rerank"
    restore: bool = True
    score: str = "attention"
    frequency_weight: float = 0.5
    per_head: bool = False
    sink: int = 0

    def validate(self, name: str) -> None:
        checks.whole_number(name, "recycle_bin_size", self.size, 1, "1 evicts in every step")
        checks.choice(name, "mode", self.mode, ("rerank", "mark"))
        checks.flag(name, "restore", self.restore)
        checks.choice(name, "score", self.score, ("attention", "frequency+importance"))
        checks.share(name, "frequency_weight", self.frequency_weight)
        checks.flag(name, "per_head_scores", self.per_head)
        checks.whole_number(name, "sink", self.sink, 0, "oldest tokens that always stay")

    # ---- the prompt

    def shrink(self, sums: Tensor, keep: Tensor, steady: Tensor, recent: Tensor) -> Tensor:
        """Brings a prompt down to the steady size by its prefill scores.

        Args:
            sums: [B, H, C], see `prompt_scores`; keep: bool [B, H, C], what may stay; steady, recent: LongTensor [B].

        Returns:
            bool [B, H, C], a subset of `keep` with at most `steady[b]` columns per head.
        """
        rank = sums if self.per_head else sums.sum(1, keepdim=True).expand_as(sums)
        place = keep.cumsum(-1)
        total = place[..., -1:]
        safe = (place <= self.sink) | (place > total - recent.to(keep.device)[:, None, None])
        rank = rank.masked_fill(safe, torch.inf).masked_fill(~keep, -torch.inf)
        return keep_top(rank, steady.to(keep.device)[:, None])

    def note(self, state: dict[str, Any], sums: Tensor, keep: Tensor, steady: Tensor, recent: Tensor) -> None:
        """Leaves in the layer's state what `open` needs: sums [B, H, C] of the columns that `keep` [B, H, C] marks."""
        length = int(keep.sum(-1).max())
        order = (~keep).to(torch.int8).argsort(dim=-1, stable=True)[..., :length]
        state["prompt_scores"] = sums.gather(-1, order)
        # [B] on the host, where the lengths are that decoding compares them with.
        state["steady"], state["recent"] = steady.cpu().clone(), recent.cpu().clone()
        state["marked"] = torch.zeros_like(state["steady"])

    def open(self, cache: CompressedCache) -> None:
        """Gives every layer's slots their fields, once the prompt is stored.

        From here on `cache.state["ddes"]` says what happened: `steady` [B] in tokens per head, `peak` (the most tokens
        that a head held), `evicted_decode` in slots.
        """
        steady = cache.compressed[0].state["steady"].tolist()
        cache.state["ddes"] = {"steady": steady, "peak": 0, "evicted_decode": 0}
        for layer in cache.compressed:
            segments = layer.segments
            if segments is None:
                continue
            prompt = layer.state.pop("prompt_scores")
            segments.add_field(SCORE, prompt, dtype=prompt.dtype)
            if self.size > 1:
                segments.add_field(MARKED, dtype=torch.bool)
            if self.score != "attention":
                segments.add_field(USES, dtype=torch.int32)
                segments.add_field(AGE, dtype=torch.int32)

    # ---- decoding

    def step(self, view: DecodeView) -> Tensor | Drop | None:
        """Adds this step's attention, Eq. 5, marks what is over the steady size, flushes a full bin.

        After it, every sequence holds l <= tokens < l + D (fewer than l only until it has grown to l). A step of q
        tokens flushes floor((tokens - l) / D) * D at once.

        Returns:
            What leaves: None when nothing does; a `Drop` where the bin holds one token, so that every step evicts;
            bool [B, H, M] of the slots to keep when a bin is flushed.
        """
        segments, state, attention_sum = view.segments, view.state, view.attention_sum
        if attention_sum is None:
            raise MethodError(
                f"{view.cache.method.name} needs the attention of each step: let needs_attention_sum return True"
            )
        if self.size == 1 and "since" not in state:
            self._look_up_protected(view)
        # Every head of a layer holds equally many.
        sizes = zip(segments.sequence_lengths, state["steady"].tolist(), strict=True)
        over = [max(0, length - steady) for length, steady in sizes]
        evict = [count // self.size * self.size for count in over]
        told = view.cache.state["ddes"]
        told["peak"] = max(told["peak"], segments.max_length)
        told["evicted_decode"] += sum(evict) * segments.heads
        if any(evict):
            view.count(flushes=sum(evict) // self.size)
        if self._one_each(state, over, evict) and cpu_scores.usable(segments.flat(SCORE), attention_sum):
            slots = self._add_and_find(view, attention_sum, over, evict)
            return Drop(slots, evict) if self.size == 1 else None
        segments.add(SCORE, attention_sum)
        if self.score != "attention":
            self._count_uses(view, attention_sum)
        if not any(over):
            return None
        if self.size == 1:
            positions = segments.view_positions()
            return Drop(_lowest(self._order(view, positions), evict, positions), evict)
        if any(evict):
            return self._flush(view, over, evict)
        self._mark(view, over)
        return None

    def _one_each(self, state: dict[str, Any], over: list[int], evict: list[int]) -> bool:
        """Whether at most one token of a sequence is to be found in this step, by scores alone: the common case."""
        if self.score != "attention" or not any(over):
            return False
        if self.size == 1:
            return max(evict) == 1
        return not any(evict) and max(map(sub, over, state["marked"].tolist())) == 1

    def _add_and_find(self, view: DecodeView, attention_sum: Tensor, over: list[int], evict: list[int]) -> Tensor:
        """The step's addition and the search (and with a bin the mark) in one pass: int64 [B, H or 1, 1].

        The same as `Segments.add` with `_lowest` or `_mark`. Sums over 16 heads or more may differ in their last bit.
        """
        segments, state = view.segments, view.state
        groups = segments.heads if self.per_head else 1
        if self.size == 1:
            wanted = evict
            first, end = self._positions_between(view, groups)
        else:
            wanted = list(map(sub, over, state["marked"].tolist()))
            state["marked"] = torch.tensor(over)
            lengths = map(sub, segments.sequence_lengths, state["recent"].tolist())
            first, end = [self.sink] * (len(over) * groups), [length for length in lengths for _ in range(groups)]
        end = [limit if wanted[i // groups] else 0 for i, limit in enumerate(end)]
        return cpu_scores.add_and_find(
            segments.runs, segments.flat(SCORE), attention_sum, first, end, per_head=self.per_head, by_position=self.size == 1,
            marked=None if self.size == 1 else segments.flat(MARKED),
        )  # fmt: skip

    def _positions_between(self, view: DecodeView, groups: int) -> tuple[list[int], list[int]]:
        """Positions of the candidates, [B * groups] each: from the first on, below the second."""
        state, batch = view.state, view.segments.batch
        first = [0] * (batch * groups)
        if self.sink:
            first = (state["last_sink"][:, :groups] + 1).flatten().tolist()
        recent = state["recent"].tolist()
        end = self._first_recent(view, recent) if any(recent) else view.seen
        if isinstance(end, Tensor):
            return first, end.expand(batch, groups, 1).flatten().tolist()
        return first, [end] * (batch * groups)

    def _mark(self, view: DecodeView, over: list[int]) -> None:
        """Puts the lowest of the others into the bin until `over` [B] tokens are in it."""
        segments, state = view.segments, view.state
        new = [count - marked for count, marked in zip(over, state["marked"].tolist(), strict=True)]
        if any(new):
            order = self._order(view)
            marked = segments.view(MARKED)[:, : order.shape[1]]
            segments.put(MARKED, _lowest(order.masked_fill(marked, torch.inf), new), new, True)
        state["marked"] = torch.tensor(over)

    def _flush(self, view: DecodeView, over: list[int], evict: list[int]) -> Tensor:
        """Empties the bin of `evict` [B] tokens, or of the lowest of all; bool [B, H, M] of what stays."""
        segments, state = view.segments, view.state
        order = -self._order(view)  # the highest goes first
        marked = segments.view(MARKED)[:, : order.shape[1]]
        new = [count - was for count, was in zip(over, state["marked"].tolist(), strict=True)]
        marked = marked | _first(order.masked_fill(marked, -torch.inf), new)
        left = [count - gone for count, gone in zip(over, evict, strict=True)]
        if self.mode == "mark" and not self.restore:
            victims = _first(order.masked_fill(~marked, -torch.inf), evict)
            marked = marked & ~victims
        else:
            # A marked token above the lowest unmarked one gives its place in the bin to it, until none is: what then
            # leaves is the lowest of all, so "mark" with restore=True and "rerank" drop the same tokens.
            victims = _first(order, evict)
            again = _first(order.masked_fill(victims, -torch.inf), left)
            flushing = torch.tensor([count > 0 for count in evict], device=order.device)[:, None, None]
            restored = marked & ~victims & ~again & flushing
            heads = segments.heads if not self.per_head else 1
            view.count(restored=int(restored.sum()) * heads)
            marked = torch.where(flushing, again, marked)
        state["marked"] = torch.tensor(left)
        segments.set_field(MARKED, marked.expand(-1, segments.heads, -1))
        return ~victims.expand(-1, segments.heads, -1)

    def _order(self, view: DecodeView, positions: Tensor | None = None) -> Tensor:
        """What tokens are ranked by, [B, H or 1, M], to be read only; the lowest goes first, and those with inf never.

        positions [B, H, M] where slots may lie in any order; without, they lie in the order of tokens.
        """
        order = self._values(view)
        segments, state = view.segments, view.state
        recent, ragged = state["recent"].tolist(), not segments.runs.uniform
        barred = None
        if positions is None:
            if ragged or self.sink or any(recent):
                slots = torch.arange(segments.max_length, device=order.device)
                end = (segments.lengths[:, 0] - state["recent"]).to(order.device)[:, None, None]
                barred = (slots < self.sink) | (slots >= end)
        else:
            positions = positions[:, : order.shape[1]]
            if ragged or self.sink:
                barred = positions <= (state["last_sink"][:, : order.shape[1]] if self.sink else -1)
            if any(recent):
                newest = positions >= self._first_recent(view, recent)
                barred = newest if barred is None else barred | newest
        return order if barred is None else order.masked_fill(barred, torch.inf)

    def _look_up_protected(self, view: DecodeView) -> None:
        """Before slots are moved for the first time: which tokens are sinks, and which are the newest.

        From then on both go by position. The newest ones are those from `seen` - `recent` on, except where the prompt's
        last tokens are not consecutive; then their positions are remembered until as many tokens were decoded.
        """
        segments, state, device = view.segments, view.state, view.segments.device
        positions, lengths = segments.view_positions(), segments.lengths[:, 0]
        state["since"] = view.seen
        if self.sink:
            at = positions[..., : self.sink]
            last = at[..., -1:] if at.shape[-1] == self.sink else at.new_zeros(*at.shape[:2], 1)
            missing = (self.sink - lengths).to(device, torch.int32)[:, None, None]  # sinks that are still to come
            state["last_sink"] = torch.where(missing > 0, view.seen + missing - 1, last)
        most = int(state["recent"].max())
        if most:
            recent = state["recent"].to(device)[:, None, None]
            number = torch.arange(most, device=device)
            slot = lengths.to(device)[:, None, None] - recent + number
            slot = torch.where(number < recent, slot, -1).expand(-1, segments.heads, -1)
            newest = positions.gather(-1, slot.clamp(0, segments.max_length - 1)).masked_fill(slot < 0, -1)
            if not bool(((newest == view.seen - recent + number) | (number >= recent)).all()):
                state["newest"] = newest

    def _first_recent(self, view: DecodeView, recent: list[int]) -> Tensor | int:
        """The lowest position that is protected as recent: one for all, or [B, H or 1, 1]."""
        state, device = view.state, view.segments.device
        if "newest" not in state:
            first = [view.seen - count for count in recent]
            return first[0] if len(set(first)) == 1 else torch.tensor(first, device=device)[:, None, None]
        passed, newest = view.seen - state["since"], state["newest"]
        decoded = torch.tensor(recent, device=device)[:, None, None]
        if passed >= max(recent):
            del state["newest"]
            return self._first_recent(view, recent)
        heads = newest.shape[1] if self.per_head else 1
        return torch.where(passed < decoded, newest[:, :heads, passed : passed + 1], view.seen - decoded)

    def _count_uses(self, view: DecodeView, attention_sum: Tensor) -> None:
        """One more step for every slot, one more use for the most attended tenth (equals of its last one included)."""
        segments = view.segments
        pooled = attention_sum if self.per_head else attention_sum.sum(1, keepdim=True)
        tenth = (segments.lengths[:, : pooled.shape[1]] * MOST_ATTENDED).ceil().to(torch.long)
        best = pooled.topk(int(tenth.max()), dim=-1).values
        least = best.gather(-1, (tenth - 1).to(attention_sum.device)[..., None])
        segments.set_field(USES, segments.field(USES) + ((pooled >= least) & (pooled > 0)))
        segments.set_field(AGE, segments.field(AGE) + 1)

    def _values(self, view: DecodeView) -> Tensor:
        """Cumulative attention, or the mean of two ranks: [B, H or 1, M], to be read only."""
        score = view.segments.view(SCORE)
        value = score if self.per_head else score.sum(1, keepdim=True)
        if self.score == "attention":
            return value
        segments, heads = view.segments, value.shape[1]
        valid = segments.valid()[:, :heads]
        frequency = segments.view(USES)[:, :heads] / segments.view(AGE)[:, :heads].clamp_min(1)
        weight = self.frequency_weight
        return weight * _rank(frequency.to(value.dtype), valid) + (1 - weight) * _rank(value, valid)


def _rank(values: Tensor, valid: Tensor) -> Tensor:
    """How many stored slots have a lower value: [B, H, M] in the values' dtype; equal values get equal ranks."""
    values = values.masked_fill(~valid, torch.inf)
    ordered = values.sort(dim=-1).values
    return torch.searchsorted(ordered, values.contiguous()).to(values.dtype)


def _lowest(order: Tensor, counts: list[int], ages: Tensor | None = None) -> Tensor:
    """The slots with the lowest values of order [B, H, M]: int64 [B, H, n], n = max(counts), the lowest first.

    Equal values: lower `ages` [B, at least H, M] first (positions, where slots lie in any order), else lower slots.
    """
    most = max(counts)
    if ages is None:
        return order.argmin(-1, keepdim=True) if most == 1 else order.argsort(dim=-1, stable=True)[..., :most]
    ages = ages[:, : order.shape[1]]
    if most == 1:
        oldest = torch.where(order == order.amin(-1, keepdim=True), ages, torch.iinfo(torch.int32).max)
        return oldest.argmin(-1, keepdim=True)
    by_age = ages.argsort(dim=-1, stable=True)
    return by_age.gather(-1, order.gather(-1, by_age).argsort(dim=-1, stable=True)[..., :most])


def _first(order: Tensor, counts: list[int]) -> Tensor:
    """Marks the counts[b] highest of order [B, H, M] in each run; ties go to the lower slot; -inf is never marked."""
    if max(counts) <= 0:
        return torch.zeros_like(order, dtype=torch.bool)
    wanted = torch.tensor(counts, device=order.device)[:, None]
    if max(counts) > 1:
        return keep_top(order, wanted)
    top, where = order.max(dim=-1, keepdim=True)  # no sorting for one
    marks = torch.zeros_like(order, dtype=torch.bool)
    return marks.scatter_(-1, where, (top > -torch.inf) & (wanted[..., None] > 0))


def check_rows(name: str, rows: str | int) -> None:
    """Validates an option `prefill_rows`."""
    if not (isinstance(rows, str) and rows == "all") and (
        isinstance(rows, bool) or not isinstance(rows, Integral) or rows < 1
    ):
        raise MethodError(f"{name}: prefill_rows must be 'all' or a whole number of rows above 0; got {rows!r}")


def check_room(name: str, steady: Tensor, protected: int, what: str) -> None:
    """Raises where the protected tokens alone exceed the steady size of some sequence."""
    smallest = math.inf if steady.numel() == 0 else int(steady.min())
    if smallest < protected:
        raise MethodError(
            f"{name}: the budget gives a sequence {smallest} tokens per head, fewer than the {protected} that {what} "
            "protects; raise the budget or lower them"
        )

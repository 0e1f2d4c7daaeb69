"""DDES in token form: one score per token, and the same tokens in all layers.

Each layer's attention in a step is added to the scores when the step is complete. The first layer of the next step
chooses what to evict by these sums, and all layers of that step evict the same slots. So an engine with one block table
per request can carry it out, and no layer waits for another one. Not in the paper, where each layer has its own scores.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import sub

import torch
from torch import Tensor

from foveakv.errors import MethodError
from foveakv.methods.ranking import mark_highest
from foveakv.methods.views import Decision, DecodeView, PrefillView, State

_OPEN = 2**62


@dataclass
class SharedState(State):
    """Scores of the stored tokens, in the order of tokens; every head of every layer stores the same ones.

    scores: [B, M], accumulated attention over all layers up to the last step, 0 beyond a sequence's length. steady,
    recent: int64 [B] on the CPU. prompt: as in `ddes.BinLayer`. pending [B, M], gone bool [B, M]: attention and victims
    of the running step. evict: their number per sequence.
    """

    scores: Tensor
    steady: Tensor
    recent: Tensor
    prompt: Tensor | None = None
    pending: Tensor | None = None
    gone: Tensor | None = None
    evict: Tensor | None = None
    peak: int = 0
    evicted_decode: int = 0

    @classmethod
    def of(
        cls,
        sums: Tensor,
        keep: Tensor,
        steady: Tensor,
        recent: Tensor,
        prompt: Tensor | None = None,
        before: SharedState | None = None,
    ) -> SharedState:
        """Create it at the end of a prompt or block: sums [B, C], scores of its columns; keep bool [B, C], stored ones.

        before: the state before the block, whose figures go on.
        """
        counts = keep.sum(-1, keepdim=True)
        order = (~keep).to(torch.int8).argsort(dim=-1, stable=True)[:, : int(counts.max())]
        inside = torch.arange(order.shape[1], device=order.device) < counts
        made = cls(sums.gather(1, order).masked_fill(~inside, 0), steady.cpu(), recent.cpu(), prompt)
        if before is not None:
            made.peak, made.evicted_decode = before.peak, before.evicted_decode
        return made

    def at_view(self, view: PrefillView) -> Tensor:
        """Return the scores at the columns of a further block's view, 0 for the block: [B, C]."""
        stored = view.candidates[:, 0].clone()
        stored[:, view.first_row :] = False
        if not self.scores.shape[1]:
            return self.scores.new_zeros(stored.shape)
        place = (stored.cumsum(-1) - 1).clamp(0, self.scores.shape[1] - 1)
        return self.scores.gather(1, place).masked_fill(~stored, 0)

    def figures(self) -> dict[str, object]:
        """Return plain values for reports."""
        return {"steady": self.steady.tolist(), "peak": self.peak, "evicted_decode": self.evicted_decode}


def shared_step(view: DecodeView, state: SharedState, size: int, sink: int) -> Decision | None:
    """Run one layer of one step; size: D, the capacity of the bin. sink: oldest tokens that are never candidates.

    Raises:
        MethodError: the view has no attention sum.
    """
    slots, attention_sum = view.slots, view.attention_sum
    if attention_sum is None:
        raise MethodError("a recycle bin needs the attention of each step: set attention_sum=True in `observes`")
    if view.compressed_idx == 0:
        _choose(view, state, size, sink)
    if state.pending is None or state.gone is None or state.evict is None:
        raise MethodError("shared scores need every layer of a step, in order")
    # Beyond a head's length the attention sum is undefined.
    received = attention_sum.masked_fill(~slots.valid(), 0).sum(1)
    state.pending += received.to(state.pending)
    counts, gone = state.evict.tolist(), state.gone
    state.peak = max(state.peak, slots.max_length)
    state.evicted_decode += sum(counts) * slots.heads
    if view.compressed_idx == len(view.request.layers) - 1:
        _complete(state, slots.sequence_lengths)
    if not any(counts):
        return None
    return Decision(keep=~gone[:, None].to(attention_sum.device), flushes=sum(counts) // size)


def _choose(view: DecodeView, state: SharedState, size: int, sink: int) -> None:
    """Choose the victims of this step by the scores up to the last one; the step's own tokens are no candidates."""
    lengths, width, new = view.slots.sequence_lengths, view.slots.max_length, view.query.shape[-2]
    state.scores = torch.nn.functional.pad(state.scores, (0, width - state.scores.shape[1]))
    over = [max(0, length - steady) for length, steady in zip(lengths, state.steady.tolist(), strict=True)]
    evict = [count // size * size for count in over]
    ends = torch.tensor(lengths) - state.recent.clamp_min(new)
    if state.prompt is not None:
        room = torch.minimum(state.prompt, ends) - sink
        state.prompt = state.prompt.masked_fill(room < torch.tensor(evict), _OPEN)
        ends = torch.minimum(ends, state.prompt)
    room = (ends - sink).clamp_min(0)
    # A turn that is longer than the steady size leaves fewer candidates than it needs; the rest goes in later steps.
    evict = [min(count, most // size * size) for count, most in zip(evict, room.tolist(), strict=True)]
    state.pending = torch.zeros_like(state.scores)
    state.gone = torch.zeros_like(state.scores, dtype=torch.bool)
    state.evict = torch.tensor(evict)
    if any(evict):
        number = torch.arange(width, device=state.scores.device)
        protected = (number < sink) | (number >= ends.to(number.device)[:, None])
        state.gone = mark_highest((-state.scores).masked_fill(protected, -torch.inf)[:, None], evict)[:, 0]


def _complete(state: SharedState, lengths: list[int]) -> None:
    """Add the attention of the step, and leave out what it evicted."""
    if state.pending is None or state.gone is None or state.evict is None:
        return
    state.scores = state.scores + state.pending
    if bool(state.evict.any()):
        left = list(map(sub, lengths, state.evict.tolist()))
        number = torch.arange(state.scores.shape[1], device=state.scores.device)
        stored = number < torch.tensor(lengths, device=number.device)[:, None]
        order = (state.gone | ~stored).to(torch.int8).argsort(dim=-1, stable=True)[:, : max(left)]
        inside = number[: max(left)] < torch.tensor(left, device=number.device)[:, None]
        state.scores = state.scores.gather(1, order).masked_fill(~inside, 0)
        if state.prompt is not None:
            state.prompt = state.prompt - state.evict
    state.pending = state.gone = state.evict = None

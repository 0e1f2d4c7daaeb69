"""StreamingLLM: a few attention sinks and a window of recent tokens (Xiao et al., arXiv 2309.17453, Sec. 3)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from foveakv.core.budget import parse_budget
from foveakv.methods import checks
from foveakv.methods.base import Method
from foveakv.methods.views import Decision, DecodeView, Evict, Granularity, PrefillView, PromptView, State, When


@dataclass
class StreamingState(State):
    """size: int64 [B], tokens that stay, on the host. lost: int64 [B], prompt columns (padding included) not stored."""

    size: Tensor
    lost: Tensor


@dataclass
class Streaming(Method):
    """Keep the first `sink` tokens and the newest ones, `budget` tokens in all, while decoding too.

    The paper re-assigns positions inside the cache; here tokens keep theirs, as everywhere in this library.
    """

    budget: float | int | str = 0.2
    sink: int = 4

    name: ClassVar[str] = "streaming"

    def __post_init__(self) -> None:
        parse_budget(self.budget)
        checks.whole_number(self.name, "sink", self.sink, 0, "oldest tokens that always stay")

    @property
    def granularity(self) -> Granularity:
        return "token"

    @property
    def decides(self) -> tuple[When, ...]:
        return "prefill", "decode"

    def begin(self, request: PromptView) -> StreamingState:
        size = request.budget_tokens(self.budget, steady=True).cpu()
        stored = torch.minimum(size, request.prompt.lengths.cpu())
        return StreamingState(size, request.prompt.columns - stored)

    def prefill(self, view: PrefillView) -> Decision:
        size = view.budget_tokens(self.budget, steady=True)
        # Rank among real tokens, so that padding takes no part in sink or window.
        rank = view.prompt.real.cumsum(-1) - 1
        first_recent = view.prompt.lengths - (size - self.sink).clamp_min(1)
        keep = (rank < torch.minimum(size - 1, size.new_tensor(self.sink))[:, None]) | (rank >= first_recent[:, None])
        return Decision(keep=keep[:, None])

    def decode(self, view: DecodeView) -> Decision | None:
        """The window is a ring: the slots behind the sinks. The newest tokens move, in order, into those of the oldest.

        Until it is full for the first time slots lie in the order of tokens, which is a ring that begins with its first
        slot. Each token that leaves lets it begin one slot later.
        """
        state: StreamingState = view.state
        lengths, sizes = view.slots.sequence_lengths, state.size.tolist()
        counts = [max(0, length - size) for length, size in zip(lengths, sizes, strict=True)]
        most = max(counts)
        if most == 0:
            return None
        slots = []
        for length, size, lost, count in zip(lengths, sizes, state.lost.tolist(), counts, strict=True):
            sinks = min(size - 1, self.sink)
            window = size - sinks
            turn = min(count, window)
            begin = view.seen - lost - length + count - turn
            leaving = [sinks + (begin + i) % window for i in range(turn)]
            leaving += range(size, size + count - turn)  # more tokens in one step than the window holds
            slots.append(leaving + [0] * (most - count))
        if most == 1 and slots.count(slots[0]) == len(slots):
            return Decision(evict=Evict(slots[0][0], counts))
        return Decision(evict=Evict(torch.tensor(slots)[:, None], counts))

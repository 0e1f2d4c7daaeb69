"""StreamingLLM: attention sinks and a window of recent tokens (Xiao et al., arXiv 2309.17453, Sec. 3)."""

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
    """State of one request, on the CPU.

    size: int64 [B], tokens to keep. lost: int64 [B], columns that were not stored (padding included) after the prompt
    or the last further block.
    """

    size: Tensor
    lost: Tensor


@dataclass
class Streaming(Method):
    """Keep the first `sink` tokens and the newest ones, `budget` tokens in total, also while decoding.

    Unlike in the paper, positions are not reassigned within the cache; tokens keep theirs, as with every method.

    Args:
        budget: tokens to keep: a share of the prompt, tokens per head, or bytes.
        sink: number of first tokens that are always kept.
    """

    budget: float | int | str = 0.2
    sink: int = 4

    name: ClassVar[str] = "streaming"

    def __post_init__(self) -> None:
        parse_budget(self.budget)
        checks.whole_number(self.name, "sink", self.sink, 0, "oldest tokens that are always kept")

    @property
    def granularity(self) -> Granularity:
        """All layers and heads store the same tokens."""
        return "token"

    @property
    def decides(self) -> tuple[When, ...]:
        """Evicts at the end of the prompt and while decoding."""
        return "prefill", "decode"

    def begin(self, request: PromptView) -> StreamingState:
        """Compute how many tokens every sequence keeps."""
        size = request.budget_tokens(self.budget, steady=True).cpu()
        stored = torch.minimum(size, request.prompt.lengths.cpu())
        return StreamingState(size, request.prompt.columns - stored)

    def prefill(self, view: PrefillView) -> Decision:
        """Keep the sinks and the newest tokens of the prompt, or of what is stored and the block."""
        candidates, size = view.candidates, view.budget_tokens(self.budget, steady=True)
        lengths = candidates.sum(-1)
        # Rank among real tokens, so that padding does not count as sink or window.
        rank = candidates.cumsum(-1) - 1
        sinks = torch.minimum(size - 1, size.new_tensor(self.sink))
        first_recent = lengths - (size - self.sink).clamp_min(1)[:, None]
        if view.stored is not None and view.compressed_idx == 0:
            view.state.lost = view.request.prompt.columns - torch.minimum(size, lengths[:, 0]).cpu()
        return Decision(keep=((rank < sinks[:, None, None]) | (rank >= first_recent[..., None])) & candidates)

    def decode(self, view: DecodeView) -> Decision | None:
        """Evict the oldest tokens of the window.

        The slots after the sinks are a ring buffer: the newest tokens move, in order, into the slots of the oldest.
        Until the window is full for the first time, slots are stored in the order of tokens, which is a ring that
        starts at its first slot. Each evicted token moves the start by one slot.
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
            leaving += range(size, size + count - turn)  # if one step has more tokens than the window holds
            slots.append(leaving + [0] * (most - count))
        if most == 1 and slots.count(slots[0]) == len(slots):
            return Decision(evict=Evict(slots[0][0], counts))
        return Decision(evict=Evict(torch.tensor(slots)[:, None], counts))

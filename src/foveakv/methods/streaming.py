"""StreamingLLM: a few attention sinks and a window of recent tokens (Xiao et al., arXiv 2309.17453, Sec. 3)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from foveakv.core.budget import parse_budget
from foveakv.methods import checks
from foveakv.methods.base import DecodeView, Drop, Method, PrefillView

if TYPE_CHECKING:
    from foveakv.engines.transformers.cache import CompressedCache


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
    def evicts_while_decoding(self) -> bool:
        return True

    def prefill(self, view: PrefillView) -> Tensor:
        size = self.budget_tokens(view.cache, self.budget, steady=True)
        # Rank among real tokens, so that padding takes no part in sink or window.
        rank = view.prompt.real.cumsum(-1) - 1
        first_recent = view.prompt.lengths - (size - self.sink).clamp_min(1)
        keep = (rank < torch.minimum(size - 1, size.new_tensor(self.sink))[:, None]) | (rank >= first_recent[:, None])
        return keep[:, None]

    def after_prefill(self, cache: CompressedCache) -> None:
        # [B] each and on the host, so that beams carry them along: the size, and by how much fewer tokens than the
        # context ever came here (padding and what the prompt lost).
        size = self.budget_tokens(cache, self.budget, steady=True).cpu()
        for layer in cache.compressed:
            if layer.segments is not None:
                layer.state["size"] = size.clone()
                layer.state["lost"] = cache.prompt_columns - torch.tensor(layer.segments.sequence_lengths)

    def decode(self, view: DecodeView) -> Drop | None:
        """The window is a ring: the slots behind the sinks. The newest tokens move, in order, into those of the oldest.

        Until it is full for the first time slots lie in the order of tokens, which is a ring that begins with its first
        slot. Each token that leaves lets it begin one slot later.
        """
        segments, state = view.segments, view.state
        lengths, sizes = segments.sequence_lengths, state["size"].tolist()
        counts = [max(0, length - size) for length, size in zip(lengths, sizes, strict=True)]
        most = max(counts)
        if most == 0:
            return None
        slots = []
        for length, size, lost, count in zip(lengths, sizes, state["lost"].tolist(), counts, strict=True):
            sinks = min(size - 1, self.sink)
            window = size - sinks
            turn = min(count, window)
            begin = view.seen - lost - length + count - turn
            leaving = [sinks + (begin + i) % window for i in range(turn)]
            leaving += range(size, size + count - turn)  # more tokens in one step than the window holds
            slots.append(leaving + [0] * (most - count))
        if most == 1 and slots.count(slots[0]) == len(slots):
            return Drop(slots[0][0], counts)
        return Drop(torch.tensor(slots)[:, None], counts)

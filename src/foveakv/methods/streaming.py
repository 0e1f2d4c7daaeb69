"""StreamingLLM: a few attention sinks and a window of recent tokens (Xiao et al., arXiv 2309.17453, Sec. 3)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from foveakv.budget import parse_budget
from foveakv.methods import checks
from foveakv.methods.base import DecodeView, Method, PrefillView


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

    def decode(self, view: DecodeView) -> Tensor | None:
        size = self.budget_tokens(view.cache, self.budget, steady=True)
        lengths = view.segments.lengths[:, 0].to(size.device)
        if not bool((lengths > size).any()):
            return None
        slot = torch.arange(view.segments.max_length, device=size.device)
        sinks = torch.minimum(size - 1, size.new_tensor(self.sink))
        drop = (slot >= sinks[:, None]) & (slot < (sinks + lengths - size)[:, None])
        return ~drop[:, None].expand(-1, view.segments.heads, -1)

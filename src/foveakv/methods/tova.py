"""TOVA: keep the tokens that the newest token attends to (Oren et al., arXiv 2401.06104, Sec. 3.2)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from foveakv.core.attention_stats import window_scores
from foveakv.core.budget import parse_budget
from foveakv.core.selection import keep_top
from foveakv.methods.base import Method
from foveakv.methods.views import (
    Decision,
    DecodeView,
    Evict,
    Granularity,
    Observes,
    PrefillView,
    PromptView,
    State,
    When,
)


@dataclass
class TOVAState(State):
    """State of one request. steady: int64 [B], tokens that every head stores."""

    steady: Tensor


@dataclass
class TOVA(Method):
    """Keep the `budget` tokens that the newest token attends to most, in every layer and in every decode step.

    The attention of the newest token is averaged over the heads of a layer, all of which keep the same tokens. A decode
    step adds one token and evicts the one with the least attention in this step.

    Not stated in the paper: the newest token is never evicted in its own step.

    Args:
        budget: tokens to keep, also while decoding: a share of the prompt, tokens per head, or bytes.
    """

    budget: float | int | str = 0.2

    name: ClassVar[str] = "tova"

    def __post_init__(self) -> None:
        parse_budget(self.budget)

    @property
    def granularity(self) -> Granularity:
        """All heads of a layer store the same tokens."""
        return "layer"

    @property
    def observes(self) -> Observes:
        """The last query of the prompt, and the attention of every decode step."""
        return Observes(queries="window", attention_sum=True)

    @property
    def decides(self) -> tuple[When, ...]:
        """Evicts at the end of the prompt and in every decode step."""
        return "prefill", "decode"

    def begin(self, request: PromptView) -> TOVAState:
        """Compute how many tokens every sequence keeps."""
        return TOVAState(request.budget_tokens(self.budget, steady=True))

    def prefill(self, view: PrefillView) -> Decision:
        """Keep the tokens that the last token of the prompt attends to most, and that token."""
        real = view.prompt.real
        score = window_scores(view.query, view.keys, 1, view.scaling, view.visible, real, fused=view.fused).mean(1)
        last = real & (real.cumsum(-1) == real.sum(-1, keepdim=True))
        score = score.masked_fill(last, torch.inf)
        candidates = view.candidates.any(1)  # all heads of a layer store the same tokens
        keep = keep_top(score.masked_fill(~candidates, -torch.inf), view.state.steady)
        return Decision(keep=keep[:, None])

    def decode(self, view: DecodeView) -> Decision | None:
        """Evict the tokens with the least attention in this step, as many as there are too many."""
        slots, received = view.slots, view.attention_sum
        if received is None:
            return None
        excess = torch.tensor(slots.sequence_lengths) - view.state.steady.cpu()
        counts = excess.clamp_min(0).tolist()
        most = max(counts)
        if most == 0:
            return None
        score = received.sum(1).masked_fill(~slots.valid()[:, 0], torch.inf)
        newest = slots.positions()[:, 0] == view.seen - 1
        score = score.masked_fill(newest, torch.finfo(score.dtype).max)
        leaving = score.topk(most, dim=-1, largest=False).indices
        return Decision(evict=Evict(leaving[:, None], counts))

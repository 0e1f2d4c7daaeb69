"""SnapKV: keep what the end of the prompt attends to (Li et al., arXiv 2404.14469, Sec. 4)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from foveakv.core.attention_stats import window_scores
from foveakv.core.budget import parse_budget
from foveakv.core.columns import newest
from foveakv.core.selection import keep_top
from foveakv.errors import MethodError
from foveakv.methods.base import Method
from foveakv.methods.checks import whole_number
from foveakv.methods.views import Decision, Observes, PrefillView


@dataclass
class SnapKV(Method):
    """Per KV head: the last `window` tokens, and the tokens they attend to most, `budget` tokens in all.

    Scores are the window's attention (mean over its rows and the query group), smoothed by an average pool over
    `kernel` neighbouring tokens. A budget no larger than the window keeps the newest tokens only.
    """

    budget: float | int | str = 0.2
    window: int = 32
    kernel: int = 5

    name: ClassVar[str] = "snapkv"

    def __post_init__(self) -> None:
        parse_budget(self.budget)
        whole_number(self.name, "window", self.window, 1, "tokens at the end of the prompt")
        whole_number(self.name, "kernel", self.kernel, 1, "neighbouring tokens to pool over")
        if self.kernel % 2 == 0:
            raise MethodError(f"{self.name}: kernel must be odd, so that a token is in the middle; got {self.kernel}")

    @property
    def observes(self) -> Observes:
        return Observes(queries="window")

    def prefill(self, view: PrefillView) -> Decision:
        size = self.layer_tokens(view)
        window, score = window_and_scores(view, self.window, size)
        score = self.smooth(score.masked_fill(window[:, None], 0.0))  # the window stays: it must not lift neighbours
        score = score.masked_fill((window | ~view.prompt.real)[:, None], -torch.inf)
        return Decision(keep=keep_top(score, (size - window.sum(-1))[:, None]) | window[:, None])

    def layer_tokens(self, view: PrefillView) -> Tensor:
        """Tokens that every head of this layer keeps: int64 [B]."""
        return view.budget_tokens(self.budget)

    def smooth(self, score: Tensor) -> Tensor:
        """Scores [B, H, C], each the mean over `kernel` neighbours."""
        return F.avg_pool1d(score, self.kernel, stride=1, padding=self.kernel // 2)


def window_and_scores(view: PrefillView, width: int, size: Tensor) -> tuple[Tensor, Tensor]:
    """The window's columns, bool [B, C] (at most `size` [B] of them), and its scores [B, H, C], 0 at padding."""
    real = view.prompt.real
    window = newest(real, size.clamp_max(width))
    score = window_scores(view.query, view.keys, width, view.scaling, view.visible, real)
    return window, score.masked_fill(~real[:, None], 0.0)

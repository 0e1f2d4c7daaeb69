"""SnapKV: keep the tokens that the end of the prompt attends to (Li et al., arXiv 2404.14469, Sec. 4)."""

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
from foveakv.methods.checks import share, whole_number
from foveakv.methods.results import Results
from foveakv.methods.views import Decision, Observes, PrefillView, ResultView


@dataclass
class SnapKV(Method):
    """Keep the last `window` tokens and the tokens that they attend to most, `budget` tokens per KV head in total.

    Scores are the window's attention (mean over its rows and the query group), smoothed by average pooling over
    `kernel` neighbouring tokens.

    In the paper the whole window is kept. If the budget is no larger than the window, only the end of the prompt is
    then kept, and answers degrade severely. Not in the paper: the window gets at most `window_share` of the budget, and
    the report has a note if that shrinks it; `window_share=1` is the paper's rule.

    Args:
        budget: tokens to keep: a share of the prompt, tokens per head, or bytes.
        window: tokens at the end of the prompt that score the others and are kept.
        kernel: neighbouring tokens to pool over, odd.
        window_share: the largest share of the budget for the window.
    """

    budget: float | int | str = 0.2
    window: int = 32
    kernel: int = 5
    window_share: float = 0.5

    name: ClassVar[str] = "snapkv"

    def __post_init__(self) -> None:
        parse_budget(self.budget)
        whole_number(self.name, "window", self.window, 1, "tokens at the end of the prompt")
        whole_number(self.name, "kernel", self.kernel, 1, "neighbouring tokens to pool over")
        share(self.name, "window_share", self.window_share, above_zero=True, meaning="of the budget, for the window")
        if self.kernel % 2 == 0:
            raise MethodError(f"{self.name}: kernel must be odd, to be centred on a token; got {self.kernel}")

    @property
    def observes(self) -> Observes:
        """The queries of the window."""
        return Observes(queries="window")

    def prefill(self, view: PrefillView) -> Decision:
        """Keep the window and the best-scored tokens before it."""
        size = self.layer_tokens(view)
        window, score = self.window_and_scores(view, size)
        score = self.smooth(score.masked_fill(window[:, None], 0.0))  # pooling must not spread the window's scores
        score = score.masked_fill((window | ~view.prompt.real)[:, None], -torch.inf)
        return Decision(keep=keep_top(score, (size - window.sum(-1))[:, None]) | window[:, None])

    def layer_tokens(self, view: PrefillView) -> Tensor:
        """Return the tokens that every head of this layer keeps: int64 [B]."""
        return view.budget_tokens(self.budget)

    def smooth(self, score: Tensor) -> Tensor:
        """Average scores [B, H, C] over `kernel` neighbouring columns."""
        return F.avg_pool1d(score, self.kernel, stride=1, padding=self.kernel // 2)

    def window_tokens(self, size: Tensor) -> Tensor:
        """Return the newest tokens that are kept regardless of their score, int64 [B], out of `size` int64 [B]."""
        return window_tokens(size, self.window, self.window_share)

    def window_and_scores(self, view: PrefillView, size: Tensor) -> tuple[Tensor, Tensor]:
        """Return the newest tokens to keep, bool [B, C], and the window's scores [B, H, C], 0 at padding.

        size: int64 [B], tokens to keep in total.
        """
        real = view.prompt.real
        score = window_scores(view.query, view.keys, self.window, view.scaling, view.visible, real)
        return newest(real, self.window_tokens(size)), score.masked_fill(~real[:, None], 0.0)

    def results(self, view: ResultView) -> Results:
        """Return a note if the budget holds a smaller window than configured."""
        size = view.request.budget_tokens(self.budget)
        kept, evicts = self.window_tokens(size), size < view.request.prompt.lengths
        if not bool((evicts & (kept < size.clamp_max(self.window))).any()):
            return Results()
        return Results({"window": kept.tolist()}, notes=(shrunk_window(int(kept.min()), self.window),))


def window_tokens(size: Tensor, window: int, share: float) -> Tensor:
    """Return the tokens of a window out of `size` int64 tokens: at most `window` and `share` of `size`, at least 1."""
    most = (size.double() * share + 1e-9).long().clamp_min(1)
    return torch.minimum(most, size.clamp_max(window))


def shrunk_window(kept: int, window: int) -> str:
    """Return the report's note on a window that does not fit the budget."""
    return f"the budget is small for window={window}: only the newest {kept} tokens are kept regardless of their score"

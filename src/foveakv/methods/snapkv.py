"""SnapKV: keep the tokens that the end of the prompt attends to (Li et al., arXiv 2404.14469, Sec. 4)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from foveakv.core.budget import parse_budget
from foveakv.core.columns import newest
from foveakv.core.selection import keep_top
from foveakv.errors import MethodError
from foveakv.methods.base import Method
from foveakv.methods.checks import share, whole_number
from foveakv.methods.presets import Presets
from foveakv.methods.results import Results
from foveakv.methods.views import Decision, Observes, PrefillView, PromptView, ResultView
from foveakv.methods.windows import (
    Auto,
    kept_window,
    pool_width,
    pooled,
    scores_of_window,
    window_note,
    window_rows,
)


@dataclass
class SnapKV(Presets, Method):
    """Keep the last `window` tokens and the tokens that they attend to most, `budget` tokens per KV head in total.

    Scores are the window's attention (mean over its rows and the query group), smoothed by average pooling over
    `kernel` neighbouring tokens.

    In the paper the window has 32 tokens, all of which are kept, and the pool has 5. Not in the paper: the window is
    the later half of the question, pooling stays within a part of an image's row (`foveakv.methods.windows`), and the
    window gets at most `window_share` of the budget. The report's details have the values used. `preset("paper")` has
    the paper's values.

    Args:
        budget: tokens to keep: a share of the prompt, tokens per head, or bytes.
        window: tokens at the end of the prompt that score the others and are kept. "auto": half of the tokens after
            the last visual one, 4 to 32, and 32 in a prompt without visual tokens.
        kernel: neighbouring tokens to pool over, odd. "auto": at most the paper's, and at most three tenths of a row of
            the prompt's median image: 5 on images of 24 x 24 tokens, 1 (no pooling) on those of 8 x 8.
        window_share: the largest share of the budget for the window.
    """

    budget: float | int | str = 0.2
    window: int | Auto = "auto"
    kernel: int | Auto = "auto"
    window_share: float = 0.5

    name: ClassVar[str] = "snapkv"
    presets: ClassVar[dict[str, dict[str, Any]]] = {"paper": {"window": 32, "kernel": 5, "window_share": 1.0}}
    paper_kernel: ClassVar[int] = 5
    """The widest automatic pool."""
    pooling: ClassVar[Literal["mean", "max"]] = "mean"

    def __post_init__(self) -> None:
        parse_budget(self.budget)
        if self.window != "auto":
            whole_number(self.name, "window", self.window, 1, 'tokens at the end of the prompt; or "auto"')
        if self.kernel != "auto":
            whole_number(self.name, "kernel", self.kernel, 1, 'neighbouring tokens to pool over; or "auto"')
            if self.kernel % 2 == 0:
                raise MethodError(f"{self.name}: kernel must be odd, to be centred on a token; got {self.kernel}")
        share(self.name, "window_share", self.window_share, above_zero=True, meaning="of the budget, for the window")

    @property
    def observes(self) -> Observes:
        """The queries of the window."""
        return Observes(queries="window")

    def prefill(self, view: PrefillView) -> Decision:
        """Keep the window and the best-scored tokens before it."""
        size = self.layer_tokens(view)
        window, score = self.window_and_scores(view, size)
        score = score.masked_fill(window | ~view.candidates, -torch.inf)
        return Decision(keep=keep_top(score, size[:, None] - window.sum(-1)) | window)

    def layer_tokens(self, view: PrefillView) -> Tensor:
        """Return the tokens that every head of this layer keeps: int64 [B]."""
        return view.budget_tokens(self.budget)

    def window_tokens(self, request: PromptView, size: Tensor) -> Tensor:
        """Return the newest tokens that are kept regardless of their score, int64 [B], out of `size` int64 [B]."""
        rows = window_rows(request.prompt, self.window, request.block_start)
        return kept_window(size, rows.to(size.device), self.window_share)

    def window_and_scores(self, view: PrefillView, size: Tensor) -> tuple[Tensor, Tensor]:
        """Return the newest tokens to keep, bool [B, 1 or H, C], and the pooled scores [B, H, C], 0 at padding.

        The scores of kept tokens count as 0, so that pooling does not spread them. In a further block, its own rows
        score, and neighbours in the pool are so by position.

        size: int64 [B], tokens to keep in total.
        """
        request, candidates = view.request, view.candidates
        window = newest(candidates, self.window_tokens(request, size))
        score = scores_of_window(view, window_rows(request.prompt, self.window, request.block_start))
        score = score.masked_fill(window | ~candidates, 0.0)
        positions = None if view.stored is None else view.positions
        widths = pool_width(request.prompt, self.kernel, self.paper_kernel)
        return window, pooled(score, widths, self.pooling, positions)

    def results(self, view: ResultView) -> Results:
        """Return the newest tokens kept, the rows that scored and the width of the pool, for each sequence.

        A note says if the budget holds a smaller window than its rows.
        """
        request = view.request
        size = request.budget_tokens(self.budget)
        rows = window_rows(request.prompt, self.window, request.block_start)
        kept, evicts = self.window_tokens(request, size), size < request.prompt.lengths
        widths = pool_width(request.prompt, self.kernel, self.paper_kernel)
        figures: dict[str, Any] = {}
        if bool(evicts.any()):
            figures = {"window": kept.tolist(), "scoring_rows": rows.tolist(), "kernel": widths}
        return Results(figures, notes=window_note(self.window, rows, kept, evicts, size))

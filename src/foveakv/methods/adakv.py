"""AdaKV: SnapKV scores with adaptive budgets per head (Feng et al., arXiv 2407.11550, Alg. 1)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch

from foveakv.core.selection import keep_top
from foveakv.methods.checks import share
from foveakv.methods.snapkv import SnapKV
from foveakv.methods.views import Decision, PrefillView


@dataclass
class AdaKV(SnapKV):
    """Select the best slots over all heads of a layer, so that heads with dispersed attention keep more.

    Every head keeps the window and at least `floor` of an equal share of the layer's budget. Scores are smoothed by max
    pooling.

    Args:
        budget, window, window_share: as in `SnapKV`.
        kernel: neighbouring tokens to pool over, odd. "auto" as in `SnapKV`, with the paper's 7 as the most.
        floor: share of an equal split of the budget that every head gets, between 0 and 1.
    """

    floor: float = 0.2

    name: ClassVar[str] = "adakv"
    presets: ClassVar[dict[str, dict[str, Any]]] = {"paper": {"window": 32, "kernel": 7, "window_share": 1.0}}
    paper_kernel: ClassVar[int] = 7
    pooling: ClassVar[Literal["mean", "max"]] = "max"

    def __post_init__(self) -> None:
        super().__post_init__()
        share(self.name, "floor", self.floor, meaning="the share of an equal split that every head gets")

    def prefill(self, view: PrefillView) -> Decision:
        """Keep the window, each head's own best slots up to its floor, and the best slots of the layer."""
        size = view.budget_tokens(self.budget)
        window, score = self.window_and_scores(view, size)
        score = score.masked_fill(window | ~view.candidates, -torch.inf)
        each = (size[:, None] - window.sum(-1)).expand(-1, score.shape[1])
        own = keep_top(score, (each * self.floor).long())
        rest = score.masked_fill(own, torch.inf)  # selected in any case
        best = keep_top(rest.flatten(1), each.sum(-1)).view_as(score)
        return Decision(keep=best | window)

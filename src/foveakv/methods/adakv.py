"""AdaKV: SnapKV's scores, with a layer's budget shared out among its heads (Feng et al., arXiv 2407.11550, Alg. 1)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.nn import functional as F

from foveakv.core.selection import keep_top
from foveakv.methods.checks import share
from foveakv.methods.snapkv import SnapKV
from foveakv.methods.views import Decision, PrefillView


@dataclass
class AdaKV(SnapKV):
    """Per layer: the best slots of all its heads together, so that heads with spread attention keep more.

    Every head keeps the window and at least `floor` of an equal share. Scores are smoothed by a max pool.
    """

    kernel: int = 7
    floor: float = 0.2

    name: ClassVar[str] = "adakv"

    def __post_init__(self) -> None:
        super().__post_init__()
        share(self.name, "floor", self.floor, meaning="the part of an equal division that every head gets")

    def prefill(self, view: PrefillView) -> Decision:
        size = view.budget_tokens(self.budget)
        window, score = self.window_and_scores(view, size)
        score = score.masked_fill(window[:, None], 0.0)  # the window stays anyway: its scores must not lift neighbours
        score = F.max_pool1d(score, self.kernel, stride=1, padding=self.kernel // 2)
        score = score.masked_fill((window | ~view.prompt.real)[:, None], -torch.inf)
        each = size - window.sum(-1)
        own = keep_top(score, (each * self.floor).long()[:, None])
        rest = score.masked_fill(own, torch.inf)  # a head's own share is always among the layer's best
        best = keep_top(rest.flatten(1), each * score.shape[1]).view_as(score)
        return Decision(keep=best | window[:, None])

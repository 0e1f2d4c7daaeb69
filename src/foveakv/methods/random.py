"""Random selection of visual tokens, a lower baseline for every method."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from foveakv.core.budget import parse_budget
from foveakv.core.selection import keep_top
from foveakv.methods.base import Method
from foveakv.methods.checks import whole_number
from foveakv.methods.views import Decision, Granularity, PrefillView


@dataclass
class Random(Method):
    """Keep all text and randomly selected visual tokens, up to `budget` tokens, the same in every layer.

    The selection depends only on the seed and on the index of a visual token in its prompt, so a prompt keeps the same
    tokens in any batch.

    Args:
        budget: tokens to keep, text included: a share of the prompt, tokens per head, or bytes.
        seed: seed of the random generator.
    """

    budget: float | int | str = 0.2
    seed: int = 0

    name: ClassVar[str] = "random"
    visual_only: ClassVar[bool] = True

    def __post_init__(self) -> None:
        parse_budget(self.budget)
        whole_number(self.name, "seed", self.seed, 0)

    @property
    def granularity(self) -> Granularity:
        """All layers and heads store the same tokens."""
        return "token"

    def prefill(self, view: PrefillView) -> Decision:
        """Keep all text and the selected visual tokens."""
        visual = view.prompt.visual
        generator = torch.Generator().manual_seed(self.seed)
        draw = torch.rand(visual.shape[1], generator=generator).to(visual.device)
        score = draw[(visual.cumsum(-1) - 1).clamp_min(0)].masked_fill(~visual, -torch.inf)
        other = (view.prompt.real & ~visual).sum(-1)
        room = (view.budget_tokens(self.budget) - other).clamp_min(0)
        return Decision(keep=(keep_top(score, room) | ~visual)[:, None])

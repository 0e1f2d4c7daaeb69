"""Random selection of visual tokens, a lower baseline for every method."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from foveakv.core.budget import parse_budget
from foveakv.core.columns import from_end
from foveakv.core.selection import keep_top
from foveakv.methods.base import Method
from foveakv.methods.checks import share, whole_number
from foveakv.methods.results import Results
from foveakv.methods.views import Decision, Granularity, PrefillView, ResultView


@dataclass
class Random(Method):
    """Keep all text and randomly selected visual tokens, up to `budget` tokens, the same in every layer.

    If text leaves less than `visual_share` of the budget to visual tokens, its oldest tokens are evicted.

    The selection depends only on the seed and on the index of a visual token in its context, so a prompt keeps the same
    tokens in any batch, and in blocks as at once.

    Args:
        budget: tokens to keep, text included: a share of the prompt, tokens per head, or bytes.
        visual_share: the share of the budget that text leaves to visual tokens, rounded down.
        seed: seed of the random generator.
    """

    budget: float | int | str = 0.2
    visual_share: float = 0.0
    seed: int = 0

    name: ClassVar[str] = "random"
    visual_only: ClassVar[bool] = True

    def __post_init__(self) -> None:
        parse_budget(self.budget)
        share(self.name, "visual_share", self.visual_share, meaning="of the budget that text leaves to visual tokens")
        whole_number(self.name, "seed", self.seed, 0)

    @property
    def granularity(self) -> Granularity:
        """All layers and heads store the same tokens."""
        return "token"

    def prefill(self, view: PrefillView) -> Decision:
        """Keep text and the selected visual tokens."""
        candidates, context = view.candidates, view.request.prompt.visual
        visual = view.prompt.visual[:, None] & candidates
        generator = torch.Generator().manual_seed(self.seed)
        draw = torch.rand(context.shape[1], generator=generator).to(visual.device)
        number = (context.cumsum(-1) - 1).clamp_min(0).gather(1, view.positions.clamp_min(0))
        score = draw[number][:, None].expand(visual.shape).masked_fill(~visual, -torch.inf)
        size = view.budget_tokens(self.budget)[:, None]
        reserved = torch.minimum((size.double() * self.visual_share + 1e-9).long(), visual.sum(-1))
        other = candidates & ~visual
        text = other & (from_end(other) <= (size - reserved)[..., None])
        return Decision(keep=keep_top(score, size - text.sum(-1)) | text)

    def results(self, view: ResultView) -> Results:
        """Return a note if the budget does not hold all text."""
        size = view.request.budget_tokens(self.budget)
        text = (view.request.prompt.real & ~view.request.prompt.visual).sum(-1) - view.request.protected
        if not bool((size < text).any()):
            return Results()
        most = int(text.max())
        return Results(notes=(f"the text of the prompt ({most} tokens) does not fit the budget: the newest is kept",))

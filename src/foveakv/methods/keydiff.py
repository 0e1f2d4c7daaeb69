"""KeyDiff: keep the tokens whose keys differ most from the mean key (Park et al., arXiv 2504.15364)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.nn.functional import normalize

from foveakv.core.budget import parse_budget
from foveakv.core.selection import keep_top
from foveakv.methods.base import Method
from foveakv.methods.knorm import precision
from foveakv.methods.views import Decision, PrefillView


@dataclass
class KeyDiff(Method):
    """Keep the `budget` tokens of every KV head whose keys are least similar to the head's anchor.

    The anchor is the mean of the normalized keys, and similarity is the cosine. It needs no queries, so it does not
    depend on the question.

    Args:
        budget: tokens to keep: a share of the prompt, tokens per head, or bytes.
    """

    budget: float | int | str = 0.2

    name: ClassVar[str] = "keydiff"

    def __post_init__(self) -> None:
        parse_budget(self.budget)

    def prefill(self, view: PrefillView) -> Decision:
        """Keep the tokens with the smallest similarity to the anchor."""
        candidates = view.candidates
        keys = normalize(view.keys.to(precision(view)), dim=-1).masked_fill(~candidates[..., None], 0)
        anchor = keys.sum(-2, keepdim=True)  # its length does not change the order of cosines
        score = -(keys * normalize(anchor, dim=-1)).sum(-1)
        return Decision(
            keep=keep_top(score.masked_fill(~candidates, -torch.inf), view.budget_tokens(self.budget)[:, None])
        )

"""Knorm: keep the tokens whose keys have the smallest norm (Devoto et al., arXiv 2406.11430)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from foveakv.core.budget import parse_budget
from foveakv.core.selection import keep_top
from foveakv.methods.base import Method
from foveakv.methods.views import Decision, PrefillView


@dataclass
class Knorm(Method):
    """Keep the `budget` tokens of every KV head whose keys have the smallest L2 norm.

    It needs no queries, so it does not depend on the question.

    Args:
        budget: tokens to keep: a share of the prompt, tokens per head, or bytes.
    """

    budget: float | int | str = 0.2

    name: ClassVar[str] = "knorm"

    def __post_init__(self) -> None:
        parse_budget(self.budget)

    def prefill(self, view: PrefillView) -> Decision:
        """Keep the tokens with the smallest keys."""
        norms = torch.linalg.vector_norm(view.keys, dim=-1, dtype=precision(view))
        return Decision(
            keep=keep_top((-norms).masked_fill(~view.candidates, -torch.inf), view.budget_tokens(self.budget)[:, None])
        )


def precision(view: PrefillView) -> torch.dtype:
    """Return the dtype in which the keys of a view are compared: float64 for float64 keys, else float32."""
    return torch.float64 if view.keys.dtype == torch.float64 else torch.float32

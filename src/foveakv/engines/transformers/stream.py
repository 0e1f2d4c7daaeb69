"""Tokens kept in the residual stream during a prefill with token pruning (see `token_pruning`)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass
class Stream:
    """Tokens kept in the residual stream.

    index: int64 [B, n], columns, ascending. valid: bool [B, n]; sequences that keep fewer tokens than the longest are
    padded on the left, so that the last token stays last. masks: masks of the shortened sequence, by the id of the full
    mask.
    """

    index: Tensor
    valid: Tensor
    masks: dict[int, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, keep: Tensor) -> Stream:
        """Create it from the tokens to keep; keep: bool [B, C]."""
        order = keep.to(torch.int8).argsort(dim=-1, stable=True)  # pruned columns first, both parts in order
        index = order[:, -int(keep.sum(-1).max()) :]
        return cls(index, keep.gather(1, index))

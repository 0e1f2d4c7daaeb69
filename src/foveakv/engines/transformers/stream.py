"""Which tokens stay in the residual stream while a prompt is read (`token_pruning` shortens it)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass
class Stream:
    """Tokens that stay in the residual stream. index: int64 [B, n], columns, ascending; valid: bool [B, n].

    Sequences that keep fewer tokens than the widest are filled at the left, so that the last token stays last. masks:
    the masks of the shortened sequence, by the identity of the whole one.
    """

    index: Tensor
    valid: Tensor
    masks: dict[int, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, keep: Tensor) -> Stream:
        """keep: bool [B, C]."""
        order = keep.to(torch.int8).argsort(dim=-1, stable=True)  # those that leave first, both in order
        index = order[:, -int(keep.sum(-1).max()) :]
        return cls(index, keep.gather(1, index))

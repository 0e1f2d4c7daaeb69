"""Selection of the highest scores per row."""

from __future__ import annotations

import torch
from torch import Tensor


def keep_top(scores: Tensor, count: Tensor) -> Tensor:
    """Mark the `count` highest scores of each row.

    Args:
        scores: [..., C]; excluded columns hold -inf and are never marked.
        count: integer tensor, broadcastable to `scores.shape[:-1]`.

    Returns:
        bool [..., C] with exactly min(count, scores above -inf) marks per row, +inf first; ties go to the lower column.
    """
    order = scores.argsort(dim=-1, descending=True, stable=True)
    rank = torch.empty_like(order).scatter_(
        -1, order, torch.arange(scores.shape[-1], device=scores.device).expand_as(order)
    )
    return (rank < count[..., None]) & (scores > -torch.inf)

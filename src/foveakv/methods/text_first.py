"""Selection that keeps text before visual tokens, and what it does if the budget does not hold all text."""

from __future__ import annotations

import torch
from torch import Tensor

from foveakv.core.columns import from_end
from foveakv.core.selection import keep_top


def text_first(
    scores: Tensor, text: Tensor, real: Tensor, budgets: Tensor, recent: Tensor, visual_share: float = 0.0
) -> Tensor:
    """Select the newest columns, then text, then the rest, text and rest by score.

    Args:
        scores: [B, H, C].
        text: bool [B, C].
        real: bool [B, C], or [B, 1 or H, C], the columns that may be kept.
        budgets, recent: int64 [B, H] or [B, 1], columns to keep and how many of them are the newest; recent <= budgets.
        visual_share: the share of the slots besides the newest columns that text leaves to the rest (if there are so
            many), rounded down. 0 gives text everything.

    Returns:
        bool [B, H, C] with min(budgets, real columns) marks per head.
    """
    real = real[:, None] if real.dim() == 2 else real
    window = real & (from_end(real) <= recent[..., None])
    earlier = real & ~window
    left = budgets - window.sum(-1)
    others = earlier & ~text[:, None]
    reserved = torch.minimum((left.double() * visual_share + 1e-9).long(), others.sum(-1))
    best_text = keep_top(scores.masked_fill(~(earlier & text[:, None]), -torch.inf), left - reserved)
    left = left - best_text.sum(-1)
    best_rest = keep_top(scores.masked_fill(~others, -torch.inf), left)
    return window | best_text | best_rest


def text_note(text: Tensor, budgets: Tensor, visual_share: float, whose: str = "the budget") -> tuple[str, ...]:
    """Return the report's note if a budget does not hold all text: text, budgets int64, tokens, of one shape."""
    small = budgets - (budgets * visual_share).long() < text
    if not bool(small.any()):
        return ()
    rest = f"{visual_share:.0%} of it is left to visual tokens" if visual_share else "visual tokens get nothing"
    return (
        f"the text of the prompt ({int(text[small].max())} tokens) does not fit {whose} "
        f"({int(budgets[small].min())} tokens per head): {rest}, and the best-scored text is kept",
    )

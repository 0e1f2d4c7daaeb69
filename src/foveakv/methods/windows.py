"""The window of newest tokens that scores a prompt, and the width of pooling: rules for what is "auto".

The papers' constants (32 rows, pools over 5 or 7 neighbours) suit long questions about images of hundreds of tokens.
Not in the papers: a window is the later half of the question, and pooling stays within a part of an image's row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from statistics import median
from typing import Literal

import torch
from torch import Tensor

from foveakv.core.attention_stats import column_sums, last_rows, window_scores
from foveakv.core.columns import from_end
from foveakv.core.prompt import PromptMap, Span
from foveakv.methods.views import PrefillView

Auto = Literal["auto"]

PAPER_WINDOW = 32
"""Rows of the window in SnapKV's and HybridKV's settings."""
LEAST_WINDOW = 4
"""Rows of an automatic window, however short the question is."""
POOLED = Fraction(3, 10)
"""Largest share of an image's row that an automatic pool covers: 7 of 24 tokens, 1 of 8."""


def window_rows(prompt: PromptMap, window: int | Auto, start: int = 0) -> Tensor:
    """Return the rows of each sequence's window: int64 [B], at least 1.

    "auto" is half of the question, which is the tokens after the last visual token, rounded up, at least `LEAST_WINDOW`
    and at most `PAPER_WINDOW`. A prompt without visual tokens gets `PAPER_WINDOW`. The first half of a question does
    not yet know what is asked, and tokens before it less so. start: column of the newest block, in which the question
    is.
    """
    if window != "auto":
        return torch.full((prompt.batch,), window, dtype=torch.int64, device=prompt.kinds.device)
    columns = torch.arange(prompt.columns, device=prompt.kinds.device)
    last = torch.where(prompt.visual, columns, -1).amax(-1, keepdim=True)
    question = (prompt.real & (columns > last.clamp_min(start - 1))).sum(-1)
    half = torch.where(last[:, 0] < 0, PAPER_WINDOW, (question + 1) // 2)
    return half.clamp(LEAST_WINDOW, PAPER_WINDOW)


def scores_of_window(view: PrefillView, rows: Tensor) -> Tensor:
    """Return the mean attention from the last `rows` int64 [B] real rows of each sequence: [B, H, C].

    In a further block, only its own rows count.
    """
    real, most = view.prompt.real, int(rows.max())
    if most == int(rows.min()):
        return window_scores(view.query, view.keys, most, view.scaling, view.visible, real, fused=view.fused)
    columns, valid = last_rows(real, most)
    valid = valid & (from_end(real).gather(1, columns) <= rows[:, None]) & (columns >= view.first_row)
    sums = column_sums(view.query, view.keys, columns, valid, view.scaling, view.visible, fused=view.fused)
    group = view.query.shape[1] // view.keys.shape[1]
    return sums / (valid.sum(-1).clamp_min(1) * group)[:, None, None]


def kept_window(budgets: Tensor, rows: Tensor, share: float) -> Tensor:
    """Return the newest tokens to keep out of `budgets` int64: at most `rows` and `share` of them, at least 1.

    rows: int64, broadcastable to `budgets`.
    """
    most = (budgets.double() * share + 1e-9).long().clamp_min(1)
    return torch.minimum(most, torch.minimum(budgets, rows))


def window_note(window: int | Auto, rows: Tensor, kept: Tensor, matters: Tensor, budgets: Tensor) -> tuple[str, ...]:
    """Return the report's note on a window that the budget made smaller than its rows, if there is one.

    window: the option. rows, kept, budgets: int64. matters: bool, where something is evicted. All of one shape.
    """
    small = matters & (kept < torch.minimum(budgets, rows))
    if not bool(small.any()):
        return ()
    asked = f"window={int(rows[small].max())}" + (" (auto)" if window == "auto" else "")
    return (
        f"the budget is small for {asked}: only the newest {int(kept[small].min())} tokens are kept "
        "regardless of their score",
    )


def pool_width(prompt: PromptMap, kernel: int | Auto, paper: int) -> list[int]:
    """Return the number of neighbouring tokens to pool over for each sequence, odd.

    "auto" is the widest odd number that is at most `paper` and at most `POOLED` of a row of the sequence's median
    image. A prompt without visual tokens gets `paper`.
    """
    if kernel != "auto":
        return [kernel] * prompt.batch
    widths = []
    for b in range(prompt.batch):
        sides = _sides(prompt.spans(b))
        room = paper if not sides else math.floor(POOLED * Fraction(median(sides)))
        widths.append(max(1, min(paper, room - 1 + room % 2)))
    return widths


def pooled(
    score: Tensor, widths: Sequence[int], how: Literal["mean", "max"], positions: Tensor | None = None
) -> Tensor:
    """Pool scores [B, H, C] over `widths[b]` neighbouring columns, with stride 1.

    positions: int64 [B, C], ascending, where columns may be missing: neighbours are then those at most half of the
    width away, and missing ones count as 0.
    """
    if len(set(widths)) > 1:
        parts = (slice(b, b + 1) for b in range(len(widths)))
        return torch.cat([pooled(score[b], widths[b], how, None if positions is None else positions[b]) for b in parts])
    if not widths or widths[0] == 1:
        return score
    if positions is not None:
        return _pooled_by_position(score, widths[0] // 2, how, positions)
    pool = torch.nn.functional.avg_pool1d if how == "mean" else torch.nn.functional.max_pool1d
    return pool(score, widths[0], stride=1, padding=widths[0] // 2)


def _pooled_by_position(score: Tensor, reach: int, how: Literal["mean", "max"], positions: Tensor) -> Tensor:
    total, columns = score.clone(), score.shape[-1]
    for shift in range(1, min(reach, columns - 1) + 1):
        near = (positions[:, shift:] - positions[:, :-shift] <= reach)[:, None]
        before, after = score[..., :-shift].masked_fill(~near, 0), score[..., shift:].masked_fill(~near, 0)
        for part, other in ((total[..., shift:], before), (total[..., :-shift], after)):
            part.copy_(part + other if how == "mean" else torch.maximum(part, other))
    return total / (2 * reach + 1) if how == "mean" else total


def _sides(spans: Sequence[Span]) -> list[float]:
    """Return the tokens in a row of each image, as if it were square.

    Runs that a single token separates, four or more of one length, are the rows of one image (Pixtral).
    """
    sides: list[float] = []
    start = 0
    for end in range(1, len(spans) + 1):
        if end < len(spans) and _next_row(spans[end - 1], spans[end]):
            continue
        rows = spans[start:end]
        if len(rows) >= 4:
            sides.append(rows[0].length)
        else:
            sides += [math.sqrt(row.length) for row in rows]
        start = end
    return sides


def _next_row(span: Span, following: Span) -> bool:
    return following.start == span.end + 1 and following.length == span.length

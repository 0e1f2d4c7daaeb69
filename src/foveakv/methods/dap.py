"""DAP, dual-attention pruning of HAE (arXiv 2602.02197): which visual tokens of a prompt to evict.

B sequences, C prompt columns. A[i, j] is the attention from text token i to visual token j in a scoring layer, averaged
over heads (the paper does not state how heads are combined).
"""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, NamedTuple

import torch
from torch import Tensor

from foveakv.core import attention_stats as scores
from foveakv.core.prompt import PromptMap
from foveakv.core.selection import keep_top
from foveakv.errors import MethodError
from foveakv.methods import checks
from foveakv.methods.views import PrefillView

R, RELATIVE_R = 0.0012, 0.7
CRITERIA = ("dual", "variance", "dual+variance")


class TextStats(NamedTuple):
    """Attention from text tokens in one layer, or its mean over several; [B, C] each, a_j, m_j and v_j of a column."""

    sums: Tensor
    maxima: Tensor
    variance: Tensor


@dataclass(frozen=True)
class DAP:
    """The rules of DAP. For the options see `foveakv.methods.hae.HAE`."""

    r: float | None
    alpha: float | None
    relative: bool
    c: int | None
    target_visual_tokens: int | float | None
    criterion: str
    variance_quantile: float

    def validate(self, name: str) -> None:
        """Raise `MethodError` unless all options are valid. name: name of the method, for messages."""
        if self.r is not None:
            checks.number(name, "r", self.r, 0, meaning="a share of attention is never negative")
        if self.alpha is not None:
            checks.number(name, "alpha", self.alpha, 0, meaning="a probability; None = no individual test")
        if self.c is not None:
            checks.whole_number(name, "c", self.c, 0, "the most tokens to evict; None = no limit")
        checks.choice(name, "criterion", self.criterion, CRITERIA)
        checks.share(name, "variance_quantile", self.variance_quantile, above_zero=True)
        target = self.target_visual_tokens
        if target is None:
            return
        number = isinstance(target, Real) and not isinstance(target, bool)
        # `not >=` also refuses nan, which compares as False with everything.
        if not number or not target >= 0 or (not isinstance(target, Integral) and target > 1):
            raise MethodError(
                f"{name}: target_visual_tokens must be a number of tokens (192) or a share of them (0.33); "
                f"got {target!r}"
            )
        if self.criterion == "dual+variance" or self.c is not None:
            raise MethodError(
                f"{name}: target_visual_tokens replaces all tests; leave c at its default, and use criterion='dual' to "
                "rank by the sum or criterion='variance' to rank by the variance"
            )

    def redundant(self, stats: TextStats, visual: Tensor) -> Tensor:
        """Return the visual tokens to evict: bool [B, C]. visual: bool [B, C]; only these columns are read."""
        sums, maxima, variance = stats
        count = visual.sum(-1, keepdim=True)
        rank = variance if self.criterion == "variance" else sums
        if self.target_visual_tokens is not None:
            target = self.target_visual_tokens
            wanted = [target if isinstance(target, Integral) else round(target * n) for n in count[:, 0].tolist()]
            kept = keep_top(rank.masked_fill(~visual, -torch.inf), torch.tensor(wanted, device=sums.device))
            return visual & ~kept
        gone = visual.clone()
        if self.criterion != "variance":
            total = sums.masked_fill(~visual, 0).sum(-1, keepdim=True)
            r = (RELATIVE_R if self.relative else R) if self.r is None else self.r
            share = r / count.clamp_min(1) if self.relative else r
            gone &= sums < share * total  # Eq. 1-2
            if self.alpha is not None:
                gone &= maxima < self.alpha  # Eq. 3
        if self.criterion != "dual":
            visible = variance.masked_fill(~visual, torch.nan)
            limit = torch.nanquantile(visible, self.variance_quantile, dim=-1, keepdim=True)
            gone &= variance < limit
        if self.c is not None:
            gone = keep_top((-rank).masked_fill(~gone, -torch.inf), torch.full_like(count[:, 0], self.c))
        return gone

    def beyond(self, stats: TextStats, visual: Tensor, most: Tensor) -> Tensor:
        """Return all but the `most` [B] highest-ranked visual tokens: bool [B, C]. visual: bool [B, C]."""
        rank = stats.variance if self.criterion == "variance" else stats.sums
        return visual & ~keep_top(rank.masked_fill(~visual, -torch.inf), most)


def room_for_visual(steady: Tensor, prompt: PromptMap, visual: Tensor) -> Tensor:
    """Return how many tokens of `visual` fit beside all other tokens: int64 [B], or all of them where less than two
    fifths of the steady size would be left.

    steady: int64 [B], tokens that DDES stores. visual: bool [B, C], visual tokens that may be evicted. Not in the
    paper, where DDES reduces nothing before the first step.
    """
    room = steady - (prompt.real & ~visual).sum(-1)
    return torch.where(room * 5 >= steady * 2, room, prompt.columns)


def text_stats(view: PrefillView, rows: str, *, value_norm: bool = False) -> TextStats:
    """Compute the attention from text tokens to every column of a layer.

    Args:
        view: the layer.
        rows: "sum" (Eq. 1), or "mean": over the text rows that can see the column, so that with several images the
            early ones, which more rows can see, have no advantage. The variance is then over these rows too.
        value_norm: multiply the sums by the norm of the column's value, averaged over heads.

    In a further block, only its own text rows count.
    """
    # Text before the first image cannot attend to it, so all text rows give the same sums as the rows after it.
    index, valid = scores.text_rows(view.prompt, max_rows=None, start=view.first_row)
    sums, maxima, variance, counts = scores.head_mean_stats(
        view.query, view.keys, index, valid, view.scaling, view.visible
    )
    if rows == "mean":
        seeing = scores.seeing_rows(index, valid, view.prompt.columns, view.visible, view.first_row)
        seeing = seeing.to(torch.float64).clamp_min(1)
        of_all = counts.to(torch.float64).clamp_min(1)[:, None]
        mean = sums.to(torch.float64) / seeing
        # Rows that cannot see a column count as 0 in the variance over all rows.
        squares = variance.to(torch.float64) * of_all + (mean * seeing).square() / of_all
        variance = (squares / seeing - mean.square()).clamp_min(0).to(sums.dtype)
        sums = mean.to(sums.dtype)
    if value_norm:
        sums = sums * _value_norms(view, sums.dtype)
    return TextStats(sums, maxima, variance)


def _value_norms(view: PrefillView, dtype: torch.dtype) -> Tensor:
    """Return the norm of every column's value, averaged over the heads that store it: [B, C]."""
    norms = view.values.to(dtype).norm(dim=-1)
    if view.stored is None:
        return norms.mean(1)
    stored = view.candidates.expand_as(norms)
    return norms.masked_fill(~stored, 0).sum(1) / stored.sum(1).clamp_min(1)


def described(view: PrefillView, stats: TextStats) -> dict[str, Any]:
    """Return the share of probabilities up to 1e-4 (the paper's sparsity) and the mean variance, visual and text."""
    columns = view.prompt.visual, view.prompt.text
    index, valid = scores.text_rows(view.prompt, max_rows=None, start=view.first_row)
    sparse = scores.sparsity(view.query, view.keys, index, valid, view.scaling, view.visible, columns)
    spread = [_mean(stats.variance, each) for each in columns]
    return {
        "visual_sparsity": sparse[0].tolist(), "text_sparsity": sparse[1].tolist(),
        "visual_variance": spread[0].tolist(), "text_variance": spread[1].tolist(),
    }  # fmt: skip


def _mean(values: Tensor, columns: Tensor) -> Tensor:
    """Return the mean over the marked columns of each sequence, [B, C] -> [B]; 0 if none is marked."""
    return values.masked_fill(~columns, 0).sum(-1) / columns.sum(-1).clamp_min(1)

"""Cumulative attention of prompt columns, from the prompt's own queries."""

from __future__ import annotations

from numbers import Integral
from typing import Literal

import torch
from torch import Tensor

from foveakv.core.attention_stats import column_sums
from foveakv.core.columns import real_first
from foveakv.errors import MethodError
from foveakv.methods.views import PrefillView


def prompt_scores(view: PrefillView, rows: Literal["all"] | int, *, value_norm: bool = False) -> Tensor:
    """Compute the attention every prompt column receives from the prompt's queries, summed over the query group.

    HAE (arXiv 2602.02197) does not state whether the prompt's queries count in Eq. 5; we count them. Of a further
    block, the block's own queries count.

    Args:
        view: the layer.
        rows: "all" sums over all queries. With a number of rows (not in the paper) the sums are estimated: a quarter of
            them are the last rows; the others are evenly spaced and represent all earlier rows. What a token gives
            itself is missed for most rows: on the embedded model's prompts of cards, an eighth of the rows misjudges a
            column by 19% of the mean sum, half of the rows by 5%; the tenth of the columns that scores best has 98%
            and 99.9% of the sum of the true best tenth, on average over layers.
        value_norm: multiply by the norm of each value, as a multiple of its mean over the head (not in the paper).

    Returns:
        [B, H, C], float32 or float64.
    """
    sums = _all_or_sampled(view, rows)
    if not value_norm:
        return sums
    real = view.candidates
    norms = view.values.to(sums.dtype).norm(dim=-1).masked_fill(~real, 0)
    mean = norms.sum(-1, keepdim=True) / real.sum(-1, keepdim=True).clamp_min(1)
    return sums * norms / mean.clamp_min(torch.finfo(sums.dtype).tiny)


def _all_or_sampled(view: PrefillView, rows: Literal["all"] | int) -> Tensor:
    real = view.prompt.real
    if view.first_row:  # a further block: only its queries are there
        real = real & (torch.arange(real.shape[1], device=real.device) >= view.first_row)
    lengths = real.sum(-1)
    order = real_first(real)
    width = int(lengths.max())
    if rows == "all" or rows >= width:
        return _sums(view, order[:, :width], torch.arange(width, device=real.device) < lengths[:, None])
    last = max(rows // 4, 1)
    early = rows - last
    # `early` rows out of the first T - last, then the `last` rows.
    before = (lengths - last).clamp_min(0)[:, None]
    steps = torch.arange(early, device=real.device)
    spread = (steps * before) // max(early, 1)  # distinct if before >= early, else some repeat
    distinct = torch.cat([torch.ones_like(before, dtype=torch.bool), spread[:, 1:] != spread[:, :-1]], -1)[:, :early]
    distinct = distinct & (spread < before)
    tail = lengths[:, None] - 1 - torch.arange(last, device=real.device)
    sums = _sums(view, order.gather(1, tail.clamp_min(0)), tail >= 0)
    if early == 0:
        return sums
    weight = before / distinct.sum(-1, keepdim=True).clamp_min(1)
    return sums + weight[:, :, None] * _sums(view, order.gather(1, spread), distinct)


def _sums(view: PrefillView, rows: Tensor, valid: Tensor) -> Tensor:
    return column_sums(view.query, view.keys, rows, valid, view.scaling, view.visible, fused=view.fused)


def check_rows(name: str, rows: str | int) -> None:
    """Validate the option `prefill_rows` of the method `name`.

    Raises:
        MethodError: it is neither "all" nor a whole number above 0.
    """
    if not (isinstance(rows, str) and rows == "all") and (
        isinstance(rows, bool) or not isinstance(rows, Integral) or rows < 1
    ):
        raise MethodError(f"{name}: prefill_rows must be 'all' or a whole number of rows above 0; got {rows!r}")

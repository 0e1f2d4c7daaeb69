"""Cumulative attention of a prompt: what every column received from the prompt's own queries."""

from __future__ import annotations

from numbers import Integral
from typing import Literal

import torch
from torch import Tensor

from foveakv.core.attention_stats import column_sums
from foveakv.core.columns import real_first
from foveakv.errors import MethodError
from foveakv.methods.views import PrefillView


def prompt_scores(view: PrefillView, rows: Literal["all"] | int) -> Tensor:
    """Attention that every prompt column got from the prompt's queries, summed over the query group: [B, H, C].

    Whether the prompt's queries count in Eq. 5 is not stated in the paper; we count them. `rows="all"` is exact. With
    a number (ours), a quarter of the rows are the last ones and the others, evenly spaced, stand for all earlier ones.
    """
    real = view.prompt.real
    lengths = real.sum(-1)
    order = real_first(real)
    width = int(lengths.max())
    if rows == "all" or rows >= width:
        return _sums(view, order[:, :width], torch.arange(width, device=real.device) < lengths[:, None])
    last = max(rows // 4, 1)
    early = rows - last
    # Rows of one sequence, by number: `early` of the first T - last, then the last ones.
    before = (lengths - last).clamp_min(0)[:, None]
    steps = torch.arange(early, device=real.device)
    spread = (steps * before) // max(early, 1)  # distinct while before >= early, else some repeat
    distinct = torch.cat([torch.ones_like(before, dtype=torch.bool), spread[:, 1:] != spread[:, :-1]], -1)[:, :early]
    distinct = distinct & (spread < before)
    tail = lengths[:, None] - 1 - torch.arange(last, device=real.device)
    sums = _sums(view, order.gather(1, tail.clamp_min(0)), tail >= 0)
    if early == 0:
        return sums
    weight = before / distinct.sum(-1, keepdim=True).clamp_min(1)
    return sums + weight[:, :, None] * _sums(view, order.gather(1, spread), distinct)


def _sums(view: PrefillView, rows: Tensor, valid: Tensor) -> Tensor:
    return column_sums(view.query, view.keys, rows, valid, view.scaling, view.visible)


def check_rows(name: str, rows: str | int) -> None:
    """Validates an option `prefill_rows`."""
    if not (isinstance(rows, str) and rows == "all") and (
        isinstance(rows, bool) or not isinstance(rows, Integral) or rows < 1
    ):
        raise MethodError(f"{name}: prefill_rows must be 'all' or a whole number of rows above 0; got {rows!r}")

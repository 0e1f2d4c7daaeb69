"""Spearman's rank correlation with a bootstrap interval.

Notation: n pairs, R resamples.
"""

from __future__ import annotations

import torch
from torch import Tensor

from foveakv.evaluation.bootstrap import Interval

_NONE = float("nan")


def rank_correlation(first: Tensor, second: Tensor, *, draws: int = 2000, seed: int = 0) -> Interval:
    """Return Spearman's correlation of two tensors with n entries each, and its 95% percentile bootstrap interval.

    Ties have their mean rank. The correlation is NaN if one side is constant; resamples in which it is are left out of
    the interval. Pairs count as independent.

    Args:
        first, second: any shape with n entries.
        draws: R. seed: of the resamples.
    """
    a, b = first.double().flatten(), second.double().flatten()
    generator = torch.Generator().manual_seed(seed)
    picked = torch.randint(len(a), (draws, len(a)), generator=generator)
    found = _correlations(a[picked], b[picked])
    found = found[~found.isnan()]
    low, high = found.quantile(torch.tensor([0.025, 0.975]).double()).tolist() if len(found) else (_NONE, _NONE)
    return Interval(float(_correlations(a[None], b[None])), low, high, len(a))


def _correlations(first: Tensor, second: Tensor) -> Tensor:
    """Return the correlation of the ranks of every row: [R], NaN where one side is constant."""
    a, b = (ranks(each) - (each.shape[1] - 1) / 2 for each in (first, second))
    return (a * b).sum(1) / (a.square().sum(1) * b.square().sum(1)).sqrt()


def ranks(values: Tensor) -> Tensor:
    """Return the rank of every entry in its row, from 0; ties have their mean rank. values: float64 [R, n]."""
    ordered = values.sort(1).values
    below = torch.searchsorted(ordered, values)
    not_above = torch.searchsorted(ordered, values, right=True)
    return (below + not_above - 1).double() / 2

"""Order stored slots by values: ranks, the lowest slots, and marks of the highest."""

from __future__ import annotations

import torch
from torch import Tensor

from foveakv.core.selection import keep_top


def rank_of(values: Tensor, valid: Tensor) -> Tensor:
    """Return the number of stored slots with a lower value: [B, H, M] in the values' dtype; ties get equal ranks."""
    values = values.masked_fill(~valid, torch.inf)
    ordered = values.sort(dim=-1).values
    return torch.searchsorted(ordered, values.contiguous()).to(values.dtype)


def lowest(order: Tensor, counts: list[int], ages: Tensor | None = None) -> Tensor:
    """Return the slots with the lowest values of order [B, H, M]: int64 [B, H, n], n = max(counts), lowest first.

    Ties go to lower `ages` [B, at least H, M] (positions, if slots are stored in any order), else to lower slots.
    """
    most = max(counts)
    if ages is None:
        return order.argmin(-1, keepdim=True) if most == 1 else order.argsort(dim=-1, stable=True)[..., :most]
    ages = ages[:, : order.shape[1]]
    if most == 1:
        oldest = torch.where(order == order.amin(-1, keepdim=True), ages, torch.iinfo(torch.int32).max)
        return oldest.argmin(-1, keepdim=True)
    by_age = ages.argsort(dim=-1, stable=True)
    return by_age.gather(-1, order.gather(-1, by_age).argsort(dim=-1, stable=True)[..., :most])


def mark_highest(order: Tensor, counts: list[int]) -> Tensor:
    """Mark the counts[b] highest values per head of order [B, H, M]; ties go to lower slots, -inf is never marked."""
    if max(counts) <= 0:
        return torch.zeros_like(order, dtype=torch.bool)
    wanted = torch.tensor(counts, device=order.device)[:, None]
    if max(counts) > 1:
        return keep_top(order, wanted)
    top, where = order.max(dim=-1, keepdim=True)  # avoids sorting
    marks = torch.zeros_like(order, dtype=torch.bool)
    return marks.scatter_(-1, where, (top > -torch.inf) & (wanted[..., None] > 0))

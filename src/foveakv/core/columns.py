"""Sums over a prompt's columns, and their order where padding stands between or before real ones."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def real_first(real: Tensor) -> Tensor:
    """Columns with the marked ones first, both parts in order: bool [..., C] -> int64 [..., C].

    A run that holds all real columns of a prompt holds them in this order.
    """
    return (~real).to(torch.int8).argsort(dim=-1, stable=True)


def from_end(real: Tensor) -> Tensor:
    """How many real entries there are from each one to the end, 1 for the last; C + 1 where not real. [..., C] both."""
    return real.flip(-1).cumsum(-1).flip(-1).masked_fill(~real, real.shape[-1] + 1)


def newest(real: Tensor, counts: Tensor) -> Tensor:
    """The last counts[b] real columns of each sequence: real bool [B, C], counts int64 [B] -> bool [B, C]."""
    return real & (from_end(real) <= counts[:, None])


def held_share(positions: Iterable[Tensor], columns: int) -> tuple[Tensor, int]:
    """For every prompt column the share of heads that hold it, float32 [C], and how many heads there are.

    positions: integers [heads, M] each; -1, and what lies behind the prompt, counts for no column.
    """
    counts, heads = torch.zeros(columns + 1), 0
    for held in positions:
        heads += len(held)
        inside = (held >= 0) & (held < columns)
        counts += torch.where(inside, held, columns).flatten().bincount(minlength=columns + 1)
    return counts[:columns] / max(heads, 1), heads


def in_order(positions: Tensor) -> Tensor:
    """Positions [B, H, M] of slots in any order -> ascending in each head, -1 (no token) at the end."""
    return (
        torch.where(positions < 0, torch.iinfo(positions.dtype).max, positions)
        .sort(dim=-1)
        .values.where(
            (positions >= 0).sum(-1, keepdim=True) > torch.arange(positions.shape[-1], device=positions.device), -1
        )
    )

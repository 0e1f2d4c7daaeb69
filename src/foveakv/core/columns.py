"""Order and counts of prompt columns, with padding before, between or after real columns."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def real_first(real: Tensor) -> Tensor:
    """Return the columns with the real ones first, both parts in order: bool [..., C] -> int64 [..., C].

    All real columns of a prompt are stored in this order.
    """
    return (~real).to(torch.int8).argsort(dim=-1, stable=True)


def from_end(real: Tensor) -> Tensor:
    """Count the real entries from each real one to the end: 1 for the last, C + 1 if not real. [..., C] -> [..., C]."""
    return real.flip(-1).cumsum(-1).flip(-1).masked_fill(~real, real.shape[-1] + 1)


def newest(real: Tensor, counts: Tensor) -> Tensor:
    """Mark the last counts[b] real columns of each sequence or head, counts int64 [B]: bool [B, ..., C], as `real`."""
    return real & (from_end(real) <= counts.view(-1, *[1] * (real.dim() - 1)))


def held_share(positions: Iterable[Tensor], columns: int) -> tuple[Tensor, int]:
    """Return for every prompt column the share of heads that store it, float32 [C], and the number of heads.

    positions: integers [heads, M] each; -1 and positions after the prompt are ignored.
    """
    counts, heads = torch.zeros(columns + 1), 0
    for held in positions:
        heads += len(held)
        inside = (held >= 0) & (held < columns)
        counts += torch.where(inside, held, columns).flatten().bincount(minlength=columns + 1)
    return counts[:columns] / max(heads, 1), heads


def in_order(positions: Tensor) -> Tensor:
    """Sort positions [B, H, M] in ascending order in each head, with -1 (no token) at the end."""
    return (
        torch.where(positions < 0, torch.iinfo(positions.dtype).max, positions)
        .sort(dim=-1)
        .values.where(
            (positions >= 0).sum(-1, keepdim=True) > torch.arange(positions.shape[-1], device=positions.device), -1
        )
    )

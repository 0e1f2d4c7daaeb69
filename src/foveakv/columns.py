"""The order of a prompt's columns, where padding stands between or before real ones."""

from __future__ import annotations

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

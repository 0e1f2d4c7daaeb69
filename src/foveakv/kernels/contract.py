"""What every backend of `foveakv.kernels` returns, and what they share."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from foveakv.memory.runs import Runs


class Attended(NamedTuple):
    """Decode attention of q queries over the stored slots of their runs."""

    out: Tensor  # [B, Hq, q, Dv] in the query's dtype
    attention_sum: Tensor | None = None  # [B, H, M] float32 (float64 for float64 queries), if needed
    lse: Tensor | None = None  # [B, Hq, q] natural log-sum-exp of the scaled scores, in the dtype of attention_sum


def value_dim(runs: Runs) -> int:
    """Dv, which is not the width of the rows where they are quantized."""
    return runs.values.shape[-1] if runs.quantizer is None else runs.quantizer.value_dim


def precision(tensor: Tensor) -> torch.dtype:
    """What attention over such a query computes in, and the dtype of attention sum and log-sum-exp."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def safe(lse: Tensor) -> Tensor:
    """Log-sum-exp that can be subtracted: rows that see nothing become 0, so that exp(-inf - 0) is 0 and not NaN."""
    return lse.masked_fill(lse == -torch.inf, 0)


def share(own: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """From two log-sum-exps: the first part's share of the whole, and the log-sum-exp of both together."""
    whole = torch.logaddexp(own, other.to(own.dtype))
    return torch.exp(own - safe(whole)), whole

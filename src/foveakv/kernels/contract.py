"""What every backend of `foveakv.kernels` gives back."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Attended(NamedTuple):
    """Decode attention of q queries over the stored slots of their runs."""

    out: Tensor  # [B, Hq, q, Dv] in the query's dtype
    mass: Tensor | None = None  # [B, H, M] float32 (float64 for float64 queries), where asked for
    lse: Tensor | None = (
        None  # [B, Hq, q] natural log-sum-exp of the scaled scores, same dtype as mass, where asked for
    )

"""Pages of a backing store that attention reads besides the segments."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Pages(NamedTuple):
    """Pages of a store that the runs of one layer attend to in one step."""

    keys: Tensor  # [N, T * D], N pages of T tokens
    values: Tensor  # [N, T * Dv]
    table: Tensor  # int64 [R, K] the pages of run b * H + h, -1 after its last one

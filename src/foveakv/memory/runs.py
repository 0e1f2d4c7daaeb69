"""What attention kernels see of a layer's stored keys and values.

Notation: B sequences, H KV heads, R = B * H runs (run r = b * H + h), M = longest run, N = rows of the flat buffers.
"Padded run coordinates" [B, H, M] address slot m of run (b, h); entries at or beyond the run's length are padding.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from foveakv.memory.quantizer import Quantizer
from foveakv.memory.residual import Residual


@dataclass
class Runs:
    """One contiguous run of slots per (sequence, KV head), as plain tensors. A new object for every change."""

    keys: Tensor  # [N, D], or uint8 rows of a quantizer; rows outside the runs are slack: undefined, may be NaN
    values: Tensor  # [N, Dv], as the keys
    positions: Tensor  # [N] int32
    start: Tensor  # [R] int64 on the keys' device: first row of every run, in ascending order
    length: Tensor  # [R] int64 on the keys' device
    batch: int
    heads: int
    max_length: int
    uniform: bool  # every run has max_length slots and starts at r * (N // R): dense views exist
    start_host: Tensor | None = None  # CPU copies of start and length: planning needs no device synchronisation
    length_host: Tensor | None = None
    quantizer: Quantizer | None = None  # how uint8 rows are dequantized; None: rows are numbers
    residual: Residual | None = None  # full-precision copies of some slots, read in place of their quantized rows


def dense(runs: Runs) -> tuple[Tensor, Tensor]:
    """Strided views keys [B, H, M, D] and values [B, H, M, Dv] of uniform runs (no copy).

    ValueError: runs that are not uniform.
    """
    if not runs.uniform:
        raise ValueError("dense views exist for uniform runs only; use Segments.gather() for padded copies")
    shape = (runs.batch, runs.heads, runs.keys.shape[0] // (runs.batch * runs.heads), -1)
    return runs.keys.view(shape)[:, :, : runs.max_length], runs.values.view(shape)[:, :, : runs.max_length]

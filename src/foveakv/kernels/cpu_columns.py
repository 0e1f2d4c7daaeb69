"""Sums over a tile of attention scores on a CPU, by the compiled library (cpu_columns.cpp).

This module is a `foveakv.core.fused_columns.Fused`.
"""

from __future__ import annotations

import ctypes
import struct

import torch
from torch import Tensor

from foveakv.kernels.build import KERNEL

# `struct Columns` of cpu_columns.cpp, field by field.
_FIELDS = {
    **dict.fromkeys(("sequences", "heads", "rows", "tokens", "width"), "q"),
    **dict.fromkeys(("scores", "stop", "seen"), "P"),
    **dict.fromkeys(("seen_sequence", "seen_token"), "q"),
    "sums": "P",
    **dict.fromkeys(("sums_sequence", "sums_head"), "q"),
}
COLUMNS = struct.Struct("".join(_FIELDS.values()))


def usable(tensor: Tensor) -> bool:
    """Whether `add` and `largest` can serve tensors like this one: only where the library is loaded already."""
    return KERNEL.loaded is not None and tensor.is_cpu and tensor.dtype != torch.float64


def add(scores: Tensor, stop: Tensor, seen: Tensor | None, sums: Tensor) -> None:
    """sums += the softmax of every row of scores over its visible columns, summed over the rows of a head.

    Args:
        scores: float32 [B, H, G * t, W], contiguous; overwritten. Row g * t + i belongs to token i.
        stop: int64 [B, t], how many of the first columns token i may see; 0 = its rows do not count.
        seen: bool [B, t, W], which of these columns token i sees (at least one of them); None = all.
        sums: float32 [B, H, W], the last dim contiguous.

    ValueError: shapes or dtypes that do not fit.
    """
    batch, heads, rows, width = scores.shape
    fits = (
        scores.dtype == sums.dtype == torch.float32
        and scores.is_contiguous()
        and stop.is_contiguous()
        and stop.dtype == torch.int64
        and stop.shape[0] == batch
        and stop.shape[1] > 0
        and rows % stop.shape[1] == 0
        and sums.shape == (batch, heads, width)
        and (sums.stride(2) == 1 or width <= 1)
    )
    if seen is not None:
        fits &= seen.dtype == torch.bool and seen.shape == (batch, stop.shape[1], width)
        seen = seen if seen.stride(2) == 1 else seen.contiguous()
    library = KERNEL.loaded
    if not fits or library is None:
        raise ValueError(f"scores {tuple(scores.shape)}, stop {tuple(stop.shape)} and sums do not belong together")
    arguments = COLUMNS.pack(
        batch, heads, rows, stop.shape[1], width, scores.data_ptr(), stop.data_ptr(),
        *((0, 0, 0) if seen is None else (seen.data_ptr(), seen.stride(0), seen.stride(1))),
        sums.data_ptr(), sums.stride(0), sums.stride(1),
    )  # fmt: skip
    if library.foveakv_add_columns(arguments):
        raise ValueError("the scores could not be summed: there is not enough memory")


def largest(values: Tensor, k: int) -> Tensor:
    """Sum the k largest numbers of each row, none below 0, over the rows of a head: [h, m, W] -> float64 [h].

    NaN anywhere in a row makes its head's sum NaN.

    ValueError: no contiguous float32 [h, m, W], or k below 1.
    """
    heads, rows, width = values.shape
    library = KERNEL.loaded
    if values.dtype != torch.float32 or not values.is_contiguous() or k < 1 or library is None:
        raise ValueError(f"largest expects contiguous float32 [h, m, W] and k >= 1, got {tuple(values.shape)}, k = {k}")
    sums = torch.empty(heads, dtype=torch.float64)
    size = ctypes.c_int64
    failed = library.foveakv_largest(
        ctypes.c_void_p(values.data_ptr()), size(heads), size(rows), size(width), size(k),
        ctypes.c_void_p(sums.data_ptr()),
    )  # fmt: skip
    if failed:
        raise ValueError("the largest numbers could not be summed: there is not enough memory")
    return sums

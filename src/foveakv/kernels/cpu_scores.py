"""Cumulative attention on a CPU: added and ranked in one pass, by the library that attends (cpu_decode.cpp)."""

from __future__ import annotations

import struct
from array import array

import torch
from torch import Tensor

from foveakv.kernels.build import KERNEL
from foveakv.memory.runs import Runs

# `struct Ranking` of cpu_decode.cpp, field by field.
_FIELDS = {
    **dict.fromkeys(("runs", "heads", "per_head", "stored"), "q"),
    **dict.fromkeys(("start", "length", "score", "attention_sum"), "P"),
    "attention_sum_width": "q",
    **dict.fromkeys(("place", "low", "high", "marked", "lowest"), "P"),
}
RANKING = struct.Struct("".join(_FIELDS.values()))


def usable(score: Tensor, attention_sum: Tensor) -> bool:
    """Whether `add_and_find` can be called: only where the library is loaded already, nothing is built for it."""
    return (
        KERNEL.loaded is not None
        and score.is_cpu
        and attention_sum.is_cpu
        and score.dtype == attention_sum.dtype == torch.float32
    )


def add_and_find(
    runs: Runs,
    score: Tensor,
    attention_sum: Tensor,
    low: list[int],
    high: list[int],
    *,
    per_head: bool,
    by_position: bool,
    marked: Tensor | None = None,
) -> Tensor:
    """score += attention_sum, and the slot with the lowest score of every group: int64 [B, H or 1, 1].

    Args:
        runs: all heads of a sequence hold equally many slots.
        score: float32 [N], a side field of the runs; changed in place.
        attention_sum: float32 [B, H, M].
        low, high: one of each for every group; candidates are the slots from `low` on, below `high`. A group without
            candidates gets slot 0.
        per_head: every run is a group; otherwise the heads of a sequence are one, and their scores are summed.
        by_position: low and high are positions (of a sequence's first head); otherwise slots. Of equals, the slot that
            is lowest by the same measure is found.
        marked: bool [N]: marked slots are not candidates; the slot found is marked in all heads of its group.

    ValueError: runs that reach beyond the buffers.
    """
    total, heads = runs.batch * runs.heads, runs.heads
    groups = total if per_head else runs.batch
    if len(low) != groups or len(high) != groups or attention_sum.shape != (runs.batch, heads, runs.max_length):
        raise ValueError(
            f"add_and_find expects {groups} bounds and attention_sum [B, H, M], got {tuple(attention_sum.shape)}"
        )
    attention_sum = attention_sum.contiguous()
    start = runs.start if runs.start_host is None else runs.start_host
    length = runs.length if runs.length_host is None else runs.length_host
    found = torch.empty((runs.batch, groups // runs.batch, 1), dtype=torch.int64)
    limits = array("q", (*low, *high))  # kept alive during the call
    bounds, _ = limits.buffer_info()
    arguments = RANKING.pack(
        total, heads, per_head, score.shape[0], start.data_ptr(), length.data_ptr(), score.data_ptr(),
        attention_sum.data_ptr(), runs.max_length, runs.positions.data_ptr() if by_position else 0,
        bounds, bounds + 8 * groups, 0 if marked is None else marked.data_ptr(),
        found.data_ptr(),
    )  # fmt: skip
    library = KERNEL.loaded
    if library is None or library.foveakv_rank(arguments):
        raise ValueError("the runs reach beyond their buffers, or heads of a sequence differ in length")
    return found

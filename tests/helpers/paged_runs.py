"""Runs in pages, made from contiguous ones: the same slots in shuffled pages of a larger buffer."""

from __future__ import annotations

from dataclasses import replace

import torch

from foveakv.memory.runs import Runs


def in_pages(runs: Runs, size: int, *, shuffled: bool = True, extra: int = 3) -> Runs:
    """The slots of contiguous runs in pages of `size` slots, with unused pages between them.

    Rows that hold no slot are NaN, or 255 where they are quantized.
    """
    lengths = runs.length.tolist()
    counts = [-(-length // size) for length in lengths]
    pages = sum(counts) + extra
    order = torch.randperm(pages) if shuffled else torch.arange(pages)
    table = torch.full((len(lengths), max(1, *counts) + 1), -1, dtype=torch.int32)
    beyond = 255 if runs.quantizer is not None else torch.nan
    keys, values = (part.new_full((pages * size, part.shape[1]), beyond) for part in (runs.keys, runs.values))
    taken = 0
    for run, (first, length, count) in enumerate(zip(runs.start.tolist(), lengths, counts, strict=True)):
        table[run, :count] = order[taken : taken + count].to(torch.int32)
        taken += count
        slots = torch.arange(length)
        rows = table[run, slots // size].to(torch.int64) * size + slots % size
        keys[rows], values[rows] = runs.keys[first : first + length], runs.values[first : first + length]
    device = runs.keys.device
    return replace(runs, keys=keys, values=values, table=table.to(device), table_host=table, page_size=size)

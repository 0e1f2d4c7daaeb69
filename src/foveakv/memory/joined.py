"""The pages of several caches as one: a decode batch made of tables only, without moving keys and values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from foveakv.memory.paged import PagedSegments
from foveakv.memory.quantizer import Quantizer
from foveakv.memory.residual import Residual
from foveakv.memory.runs import Runs


def can_join(members: Sequence[PagedSegments]) -> bool:
    """Whether `join_runs` takes these layers: same pool and kind of pages, heads, kind and window of quantized rows."""
    return len({_kind(member) for member in members}) == 1


def join_runs(members: Sequence[PagedSegments]) -> Runs:
    """One layer of several caches as the runs of one batch, for one call of `foveakv.kernels.attend`.

    Member i's sequences follow those of member i - 1. Keys and values are read in place. What is made anew: the table,
    starts and lengths; of quantized members also scales, entries and full-precision copies. Positions are not part of
    the result. Valid until a member changes.

    ValueError: members that cannot be joined, see `can_join`.
    """
    if not members or not can_join(members):
        kinds = [_kind(member) for member in members]
        raise ValueError(f"only layers in the same kind of pages of one pool can be joined, got {kinds}")
    parts = [member.runs for member in members]
    first = parts[0]
    if len(parts) == 1:
        return first
    tables = [part.table_host for part in parts if part.table_host is not None]
    width = max(table.shape[1] for table in tables)
    host = torch.full((sum(len(table) for table in tables), width), -1, dtype=torch.int32)
    lengths = torch.cat([part.length if part.length_host is None else part.length_host for part in parts])
    row = 0
    for table in tables:
        host[row : row + len(table), : table.shape[1]] = table
        row += len(table)
    entries, shift, starts = [], 0, []
    for part in parts:
        start = part.start if part.start_host is None else part.start_host
        starts.append(start + shift)
        if part.residual is not None:
            entries.append(part.residual.slot_entry)
            shift += len(part.residual.slot_entry)
        else:
            shift += len(part.positions)
    start, device = torch.cat(starts), first.keys.device
    joined = replace(
        first, positions=first.positions[:0], start=start.to(device), start_host=start, length=lengths.to(device),
        length_host=lengths, batch=sum(part.batch for part in parts), max_length=max(part.max_length for part in parts),
        uniform=False, table=host.to(device), table_host=host, residual=None,
    )  # fmt: skip
    if first.quantizer is not None:
        joined.quantizer = _quantizers([part.quantizer for part in parts if part.quantizer is not None])
    if entries:
        copies = [part.residual for part in parts if part.residual is not None]
        joined.residual = Residual(
            torch.cat([part.keys for part in copies]), torch.cat([part.values for part in copies]), torch.cat(entries)
        )
    return joined


def _quantizers(parts: list[Quantizer]) -> Quantizer:
    scales: list[Tensor] = [torch.cat([part.key_scale for part in parts]), torch.cat([part.key_zero for part in parts])]
    return replace(parts[0], key_scale=scales[0], key_zero=scales[1])


def _kind(member: PagedSegments) -> tuple[object, ...]:
    """What joined members have in common."""
    quantized = member._quantized
    window = None if quantized is None or quantized.window is None else quantized.window.length
    kind = None if quantized is None else (quantized.quantizer.kind, quantized.dtype, window)
    return id(member.table.space), member.heads, kind

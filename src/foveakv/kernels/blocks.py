"""Decode attention from PyTorch's own attention, on any device and without a compiler.

The query heads that share a KV head are packed as rows, so that every key is read once and never repeated.

Uniform runs are dense views: one call. Ragged runs on a CPU: one call per run, in place; on several threads a run is
cut into equal strips, because a call spreads its batch over the threads and a single run would leave all but one idle.
(Copying runs together into one padded batch costs several times what reading them in place does.) Ragged runs on
other devices, where each launch is expensive: see `tiles.py`. Runs in pages are copied together, run by run on a CPU,
except those whose pages happen to follow each other. Pieces of a run are merged by their log-sum-exp.

In shapes: n = G * q packed query rows, T = slots of a piece, P = pieces.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from foveakv.kernels.contract import Attended, precision, share, value_dim
from foveakv.kernels.packed import attend_dense, attend_pieces, merge, nothing, on_host, pack, pack_mask
from foveakv.kernels.tiles import attend_tiles
from foveakv.memory.runs import Runs, contiguous, dense, padded_rows, run_rows

# Ragged runs are copied into one padded batch while that is cheaper than more calls: on a CPU while the keys of a run
# take no more bytes than this, elsewhere up to this many slots.
PADDED_BYTES_CPU = 32 * 1024
PADDED_SLOTS = 1024
SHORTEST_STRIP = 256


def attend(
    query: Tensor,
    runs: Runs,
    scaling: float,
    mask: Tensor | None = None,
    need_attention_sum: bool = False,
    need_lse: bool = False,
    other_lse: Tensor | None = None,
) -> Attended:
    """See `foveakv.kernels.attend` for shapes.

    Where query, keys and values differ in dtype, the stored ones are widened in every call, into copies of the buffers.
    """
    if runs.quantizer is None and not query.dtype == runs.keys.dtype == runs.values.dtype:
        return _attend_widened(query, runs, scaling, mask, need_attention_sum, need_lse, other_lse)
    if runs.quantizer is not None:  # dequantized run by run
        found = attend_strips(query.to(precision(query)), runs, scaling, mask, need_attention_sum, need_lse, other_lse)
        return found._replace(out=found.out.to(query.dtype))
    if query.device.type != "cpu":
        runs = contiguous(runs)
        few = runs.uniform or runs.max_length <= PADDED_SLOTS
        return (attend_whole if few else attend_tiles)(
            query, runs, scaling, mask, need_attention_sum, need_lse, other_lse
        )
    if runs.dense_views:
        # One call gives every run to one thread; long runs on a machine with more threads than runs are cut.
        idle = torch.get_num_threads() > runs.batch * runs.heads and runs.max_length >= 4 * SHORTEST_STRIP
        whole = need_attention_sum or not idle
    else:
        whole = runs.max_length * runs.keys.shape[1] * runs.keys.element_size() <= PADDED_BYTES_CPU
    return (attend_whole if whole else attend_strips)(
        query, runs, scaling, mask, need_attention_sum, need_lse, other_lse
    )


def _attend_widened(
    query: Tensor, runs: Runs, scaling: float, mask: Tensor | None, need_attention_sum: bool, need_lse: bool,
    other_lse: Tensor | None,
) -> Attended:  # fmt: skip
    """`attend` for tensors of different dtypes: PyTorch's attention takes one."""
    runs = contiguous(runs)  # not a copy of all pages of a pool
    wide = torch.promote_types(torch.promote_types(query.dtype, runs.keys.dtype), runs.values.dtype)
    runs = replace(runs, keys=runs.keys.to(wide), values=runs.values.to(wide))
    out, attention_sum, lse = attend(query.to(wide), runs, scaling, mask, need_attention_sum, need_lse, other_lse)
    dtype = precision(query)
    attention_sum, lse = (None if found is None else found.to(dtype) for found in (attention_sum, lse))
    return Attended(out.to(query.dtype), attention_sum, lse)


def attend_whole(
    query: Tensor,
    runs: Runs,
    scaling: float,
    mask: Tensor | None = None,
    need_attention_sum: bool = False,
    need_lse: bool = False,
    other_lse: Tensor | None = None,
) -> Attended:
    """All runs in one call: dense views of uniform runs, a padded copy of ragged ones."""
    if runs.max_length == 0:
        return nothing(query, runs, need_attention_sum, need_lse, other_lse)
    packed = pack(query, runs.heads)
    keys, values, stored = (*dense(runs), None) if runs.dense_views else _padded(runs)
    allowed = None if mask is None else pack_mask(mask, packed.shape[2])
    if stored is not None:
        allowed = stored if allowed is None else allowed & stored
    other = None if other_lse is None else other_lse.reshape(packed.shape[:3])
    out, attention_sum, lse = attend_dense(packed, keys, values, scaling, allowed, need_attention_sum, need_lse, other)
    return Attended(
        out.reshape(*query.shape[:3], -1), attention_sum, None if lse is None else lse.reshape(query.shape[:3])
    )


def attend_strips(
    query: Tensor,
    runs: Runs,
    scaling: float,
    mask: Tensor | None = None,
    need_attention_sum: bool = False,
    need_lse: bool = False,
    other_lse: Tensor | None = None,
    *,
    threads: int | None = None,
    shortest: int = SHORTEST_STRIP,
) -> Attended:
    """One call per run, in place; with several threads up to two strips of a run for each, merged at the end."""
    if runs.max_length == 0:
        return nothing(query, runs, need_attention_sum, need_lse, other_lse)
    packed = pack(query, runs.heads)
    batch, heads, n, _ = packed.shape
    rows = packed.view(batch * heads, n, -1)
    out = query.new_zeros(batch * heads, n, value_dim(runs))
    attention_sum = (
        torch.zeros(len(rows), runs.max_length, dtype=precision(query), device=query.device)
        if need_attention_sum
        else None
    )
    lse = torch.full((len(rows), n), -torch.inf, dtype=precision(query), device=query.device) if need_lse else None
    other = None if other_lse is None else other_lse.reshape(batch * heads, n)
    if lse is not None and other is not None:
        lse.copy_(other)
    allowed = None
    if mask is not None:
        allowed = pack_mask(mask, n).expand(batch, heads, -1, -1).reshape(batch * heads, -1, runs.max_length)
    threads = torch.get_num_threads() if threads is None else threads
    most = 1 if threads == 1 else 2 * threads
    strips: list[tuple[Tensor, Tensor]] = []
    owners: list[int] = []
    start, length = on_host(runs)
    for run, (first, stored) in enumerate(zip(start.tolist(), length.tolist(), strict=True)):
        if stored == 0:
            continue
        at = run_rows(runs, run, first, stored)
        keys, values = runs.keys[at], runs.values[at]
        if runs.quantizer is not None:
            keys = runs.quantizer.dequantize_keys(keys, run).to(query.dtype)
            values = runs.quantizer.dequantize_values(values).to(query.dtype)
        visible = None if allowed is None else allowed[run, :, :stored]
        count = 1 if need_attention_sum else max(1, min(most, stored // shortest))
        if count == 1:
            # Four dimensions: with fewer, PyTorch falls back to a path that copies the keys.
            visible = None if visible is None else visible[None, None]
            beside = None if other is None else other[None, None, run]
            got, got_attention_sum, got_lse = attend_dense(
                rows[None, None, run], keys[None, None], values[None, None], scaling, visible,
                need_attention_sum, need_lse, beside,
            )  # fmt: skip
            out[run] = got[0, 0]
            if lse is not None and got_lse is not None:
                lse[run] = got_lse[0, 0]
            if attention_sum is not None and got_attention_sum is not None:
                attention_sum[run, :stored] = got_attention_sum[0, 0]
            continue
        size = stored // count
        for low, pieces, width in ((0, count, size), (count * size, 1, stored - count * size)):
            if width == 0:
                continue
            part = slice(low, low + pieces * width)
            seen = None if visible is None else visible[:, part].unflatten(1, (pieces, width)).transpose(0, 1)
            got, sums, _ = attend_pieces(
                rows[run].expand(pieces, n, -1),
                keys[part].view(pieces, width, -1),
                values[part].view(pieces, width, -1),
                scaling,
                seen,
                False,
            )
            strips.append((got, sums))
            owners += [run] * pieces
    if strips:
        outs, sums = (torch.cat(parts) for parts in zip(*strips, strict=True))
        merged, merged_lse = merge(outs, sums, torch.tensor(owners, device=query.device), len(rows))
        split = torch.tensor(sorted(set(owners)), device=query.device)
        if other is not None:
            portion, merged_lse = share(merged_lse, other)
            merged = merged * portion[..., None]
        out.index_copy_(0, split, merged[split].to(out.dtype))
        if lse is not None:
            lse.index_copy_(0, split, merged_lse[split].to(lse.dtype))
    if attention_sum is not None:
        attention_sum = attention_sum.view(batch, heads, -1)
    return Attended(out.view(*query.shape[:3], -1), attention_sum, None if lse is None else lse.view(query.shape[:3]))


def _padded(runs: Runs) -> tuple[Tensor, Tensor, Tensor]:
    """keys [B, H, M, D], values [B, H, M, Dv] and stored bool [B, H, 1, M], without touching slack.

    Padding repeats a run's last slot: masking its score is enough, while slack rows could be NaN and survive a zero
    weight. Runs of length 0 read some row of the buffer; they are fully masked and their output is overwritten.
    """
    shape = (runs.batch, runs.heads, runs.max_length)
    rows, stored = padded_rows(runs)
    keys = runs.keys.index_select(0, rows.view(-1)).view(*shape, -1)
    values = runs.values.index_select(0, rows.view(-1)).view(*shape, -1)
    return keys, values, stored.view(runs.batch, runs.heads, 1, runs.max_length)

"""Quantized runs whose newest slots also have full-precision copies, for backends that do not read the copies.

The backend attends to the quantized rows of all other slots; the copies, which are few, are attended to here; and the
two are merged by their log-sum-exp.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from foveakv.kernels.contract import Attended, precision, safe
from foveakv.memory.runs import Runs


def attend_with_residual(
    backend: Callable[..., Attended],
    query: Tensor,
    runs: Runs,
    scaling: float,
    mask: Tensor | None = None,
    need_attention_sum: bool = False,
    need_lse: bool = False,
    other_lse: Tensor | None = None,
) -> Attended:
    """`backend`, but slots that have full-precision copies are read from them; see `foveakv.kernels.attend`."""
    residual, longest = runs.residual, runs.max_length
    quantized = replace(runs, residual=None)
    if residual is None or longest == 0 or residual.keys.shape[1] == 0:
        return backend(query, quantized, scaling, mask, need_attention_sum, need_lse, other_lse)
    batch, _, q, dim = query.shape
    heads, width = runs.heads, residual.keys.shape[1]
    entry = _entries(runs)
    owner = entry.new_full((batch * heads, width + 1), -1)  # [R, W + 1] the slot of every entry; one for all others
    slots = torch.arange(longest, device=entry.device).expand_as(entry)
    owner = owner.scatter_(1, entry.masked_fill(entry < 0, width), slots)[:, :width].view(batch, heads, width)
    used, at = owner >= 0, owner.clamp_min(0)

    seen = (entry < 0).view(batch, heads, 1, longest).expand(-1, -1, q, -1)
    copied = used[:, :, None].expand(-1, -1, q, -1)
    if mask is not None:
        mask = mask.expand(batch, heads, -1, -1)
        seen = seen & mask
        copied = copied & mask.gather(3, at[:, :, None].expand(-1, -1, q, -1))

    dtype = precision(query)
    packed = query.reshape(batch, heads, -1, dim).to(dtype) * scaling  # [B, H, n, D]
    keys, values = (part.to(dtype).view(batch, heads, width, -1) for part in (residual.keys, residual.values))
    scores = (packed @ keys.transpose(-1, -2)).view(batch, heads, -1, q, width)
    scores = scores.masked_fill(~copied[:, :, None], -torch.inf).view(batch, heads, -1, width)
    outside = scores.logsumexp(-1).view(query.shape[:3])
    if other_lse is not None:
        outside = torch.logaddexp(outside, other_lse.to(dtype))
    # A 16-bit output would be rounded before the sum; on a GPU this is accepted for its 16-bit products.
    asked = query.to(dtype) if query.is_cpu else query
    found = backend(asked, quantized, scaling, seen, need_attention_sum, True, outside)
    assert found.lse is not None  # requested
    weights = torch.exp(scores - safe(found.lse).view(batch, heads, -1, 1))  # [B, H, n, W]
    out = found.out + (weights @ values).view(found.out.shape)
    attention_sum = found.attention_sum
    if attention_sum is not None:
        attention_sum = attention_sum.scatter_add(2, at, weights.sum(2))  # nothing where an entry is not in use
    return Attended(out.to(query.dtype), attention_sum, found.lse if need_lse else None)


def _entries(runs: Runs) -> Tensor:
    """int64 [R, M]: the entry of every slot's copy, -1 where it has none and beyond a run."""
    assert runs.residual is not None
    entry, total = runs.residual.slot_entry, runs.batch * runs.heads
    if runs.uniform:
        return entry.view(total, -1)[:, : runs.max_length].to(torch.int64)
    slots = torch.arange(runs.max_length, device=entry.device)
    rows = (runs.start[:, None] + slots).clamp_(max=entry.shape[0] - 1)
    return entry[rows].to(torch.int64).masked_fill_(slots >= runs.length[:, None], -1)

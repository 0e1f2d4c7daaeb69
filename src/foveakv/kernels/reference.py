"""Decode attention in plain PyTorch, one run after another: the truth that the other backends are tested against."""

from __future__ import annotations

import torch
from torch import Tensor

from foveakv.kernels.contract import Attended
from foveakv.memory.segments import Runs


def attend(
    query: Tensor,
    runs: Runs,
    scaling: float,
    mask: Tensor | None = None,
    need_mass: bool = False,
    need_lse: bool = False,
) -> Attended:
    """See `foveakv.kernels.attend` for shapes."""
    batch, query_heads, q, _ = query.shape
    group = query_heads // runs.heads
    precision = torch.float64 if query.dtype == torch.float64 else torch.float32
    out = query.new_zeros(batch, query_heads, q, runs.values.shape[-1])
    mass = torch.zeros(batch, runs.heads, runs.max_length, dtype=precision, device=query.device)
    lse = torch.full((batch, query_heads, q), -torch.inf, dtype=precision, device=query.device)
    starts, lengths = runs.start.tolist(), runs.length.tolist()
    for b in range(batch):
        for h in range(runs.heads):
            first, length = starts[b * runs.heads + h], lengths[b * runs.heads + h]
            if length == 0:
                continue
            heads = slice(h * group, (h + 1) * group)
            keys = runs.keys[first : first + length].to(precision)
            values = runs.values[first : first + length].to(precision)
            scores = query[b, heads].to(precision) @ keys.T * scaling  # [G, q, length]
            if mask is not None:
                allowed = mask[b, h if mask.shape[1] > 1 else 0, :, :length]  # [q, length]
                scores = scores.masked_fill(~allowed, -torch.inf)
            probabilities = torch.nan_to_num(scores.softmax(-1)) if mask is not None else scores.softmax(-1)
            out[b, heads] = (probabilities @ values).to(query.dtype)
            mass[b, h, :length] = probabilities.sum((0, 1))
            lse[b, heads] = scores.logsumexp(-1)
    return Attended(out, mass if need_mass else None, lse if need_lse else None)

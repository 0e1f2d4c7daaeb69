"""Decode attention in plain PyTorch, one run after another: the reference for tests of the other backends."""

from __future__ import annotations

import torch
from torch import Tensor

from foveakv.kernels.contract import Attended, precision, share, value_dim
from foveakv.memory.runs import Runs, run_rows


def attend(
    query: Tensor,
    runs: Runs,
    scaling: float,
    mask: Tensor | None = None,
    need_attention_sum: bool = False,
    need_lse: bool = False,
    other_lse: Tensor | None = None,
) -> Attended:
    """See `foveakv.kernels.attend` for shapes."""
    batch, query_heads, q, _ = query.shape
    group = query_heads // runs.heads
    dtype = precision(query)
    out = query.new_zeros(batch, query_heads, q, value_dim(runs))
    attention_sum = torch.zeros(batch, runs.heads, runs.max_length, dtype=dtype, device=query.device)
    lse = torch.full((batch, query_heads, q), -torch.inf, dtype=dtype, device=query.device)
    if other_lse is not None:
        lse.copy_(other_lse)
    for run, (first, length) in enumerate(zip(runs.start.tolist(), runs.length.tolist(), strict=True)):
        if length == 0:
            continue
        b, h = divmod(run, runs.heads)
        heads = slice(h * group, (h + 1) * group)
        rows = run_rows(runs, run, first, length)
        keys, values = runs.keys[rows], runs.values[rows]
        if runs.quantizer is not None:
            keys, values = runs.quantizer.dequantize_keys(keys, run), runs.quantizer.dequantize_values(values)
        keys, values = keys.to(dtype), values.to(dtype)
        scores = query[b, heads].to(dtype) @ keys.T * scaling  # [G, q, length]
        if mask is not None:
            allowed = mask[b, h if mask.shape[1] > 1 else 0, :, :length]  # [q, length]
            scores = scores.masked_fill(~allowed, -torch.inf)
        probabilities = torch.nan_to_num(scores.softmax(-1)) if mask is not None else scores.softmax(-1)
        whole = scores.logsumexp(-1)
        if other_lse is not None:
            part, whole = share(whole, other_lse[b, heads])
            probabilities = probabilities * part[..., None]
        out[b, heads] = (probabilities @ values).to(query.dtype)
        attention_sum[b, h, :length] = probabilities.sum((0, 1))
        lse[b, heads] = whole
    return Attended(out, attention_sum if need_attention_sum else None, lse if need_lse else None)

"""Attention over packed query rows with PyTorch's own functions: shared functions of the `blocks` backend.

In shapes: n = G * q packed query rows of a KV head, M or T = slots, P = pieces of runs.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from foveakv.kernels.contract import Attended, precision, safe, share, value_dim
from foveakv.memory.runs import Runs


def nothing(query: Tensor, runs: Runs, need_attention_sum: bool, need_lse: bool, other_lse: Tensor | None) -> Attended:
    """No run stores anything: zeros, and an empty attention sum."""
    attention_sum = torch.zeros(runs.batch, runs.heads, 0, dtype=precision(query), device=query.device)
    lse = torch.full(query.shape[:3], -torch.inf, dtype=precision(query), device=query.device)
    if other_lse is not None:
        lse.copy_(other_lse)
    out = query.new_zeros(*query.shape[:3], value_dim(runs))
    return Attended(out, attention_sum if need_attention_sum else None, lse if need_lse else None)


def pack(query: Tensor, heads: int) -> Tensor:
    """[B, H * G, q, D] -> contiguous [B, H, G * q, D]."""
    batch, query_heads, q, dim = query.shape
    return query.reshape(batch, heads, query_heads // heads * q, dim).contiguous()


def on_host(runs: Runs) -> tuple[Tensor, Tensor]:
    """start [R] and length [R] on the CPU."""
    start = runs.start.cpu() if runs.start_host is None else runs.start_host
    length = runs.length.cpu() if runs.length_host is None else runs.length_host
    return start, length


def pack_mask(mask: Tensor, n: int) -> Tensor:
    """[X, Y, q, M] -> [X, Y, n, M] in the row order of packed queries; one query needs no copy."""
    x, y, q, longest = mask.shape
    if q == 1:
        return mask
    return mask[:, :, None].expand(x, y, n // q, q, longest).reshape(x, y, n, longest)


def attend_dense(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    scaling: float,
    allowed: Tensor | None,
    need_attention_sum: bool,
    need_lse: bool,
    other_lse: Tensor | None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Attention in one piece: query [B, H, n, D], keys [B, H, M, D], allowed bool, broadcastable to [B, H, n, M].

    other_lse [B, H, n] or None.

    Returns out [B, H, n, Dv], attention_sum [B, H, M] and log-sum-exp [B, H, n], the latter two where needed.
    """
    attention_sum = lse = None
    if (
        need_attention_sum
        or need_lse
        or other_lse is not None
        or (keys.device.type == "cpu" and keys.shape[-1] != values.shape[-1])
    ):  # no fused kernel for those
        scores = _scores(query, keys, scaling, allowed)
        probabilities = scores.softmax(-1)
        if allowed is not None:
            probabilities = probabilities.masked_fill(~allowed.any(-1, keepdim=True), 0)
        lse = scores.logsumexp(-1) if need_lse or other_lse is not None else None
        if lse is not None and other_lse is not None:
            part, lse = share(lse, other_lse)
            probabilities = probabilities * part[..., None]
        out = probabilities @ values.to(probabilities.dtype)
        attention_sum = probabilities.sum(-2) if need_attention_sum else None
    else:
        out = F.scaled_dot_product_attention(query, keys, values, attn_mask=allowed, scale=scaling)
    if allowed is not None:
        out = out.masked_fill(~allowed.any(-1, keepdim=True), 0)
    return out.to(query.dtype), attention_sum, lse if need_lse else None


def _scores(query: Tensor, keys: Tensor, scaling: float, allowed: Tensor | None) -> Tensor:
    """Scaled scores [..., n, M] in float32 or float64, -inf where not allowed."""
    dtype = precision(query)
    scores = (query.to(dtype) * scaling) @ keys.to(dtype).transpose(-1, -2)
    return scores if allowed is None else scores.masked_fill(~allowed, -torch.inf)


def attend_pieces(
    query: Tensor, keys: Tensor, values: Tensor, scaling: float, allowed: Tensor | None, need_scores: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Attention over P pieces: query [P, n, D], keys [P, T, D], values [P, T, Dv], allowed [P, n or 1, T].

    Returns out [P, n, Dv], log-sum-exp [P, n] and, where needed, scores [P, n, T]. Rows that may attend to nothing
    have log-sum-exp -inf; their output is meaningless.
    """
    if query.device.type == "cpu" and query.shape[-1] == values.shape[-1] and not need_scores:
        bias = None
        if allowed is not None:
            bias = torch.zeros(allowed.shape, dtype=query.dtype).masked_fill_(~allowed, -torch.inf)[:, None]
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query[:, None], keys[:, None], values[:, None], 0.0, False, attn_mask=bias, scale=scaling
        )
        out, lse = out[:, 0].to(precision(query)), lse.reshape(query.shape[:2])
        if allowed is not None:  # the call reports 0 for rows that see nothing
            lse = lse.masked_fill(~allowed.any(-1), -torch.inf)
        return out, lse, None
    scores = _scores(query, keys, scaling, allowed)
    lse = scores.logsumexp(-1)
    out = torch.exp(scores - safe(lse)[..., None]) @ values.to(scores.dtype)
    return out, lse, scores if need_scores else None


def merge(out: Tensor, lse: Tensor, owner: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """Pieces out [P, n, Dv], lse [P, n] of run owner[P] -> out [R, n, Dv], lse [R, n]."""
    n = lse.shape[1]
    index = owner[:, None].expand(-1, n)
    top = lse.new_full((total, n), -torch.inf).scatter_reduce_(0, index, lse, "amax")
    weight = torch.exp(lse - safe(top)[owner])
    # where, not a product: rows that see nothing may hold NaN. A NaN that is stored has a NaN weight and propagates.
    parts = torch.where(weight[..., None] == 0, 0, out * weight[..., None])
    summed = out.new_zeros(total, n, out.shape[-1]).index_add_(0, owner, parts)
    norm = lse.new_zeros(total, n).index_add_(0, owner, weight)
    merged = torch.where(norm[..., None] == 0, 0, summed / norm[..., None])
    return merged, top + torch.log(norm)

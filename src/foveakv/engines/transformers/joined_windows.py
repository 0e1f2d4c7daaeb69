"""Layers of a joined step that are transformers' own: plain keys and values, often of a sliding window."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from foveakv.engines.transformers.cache import CompressedCache


def attend_window(
    query: Tensor, keys: Tensor, values: Tensor, member: CompressedCache, seen: int, scaling: float
) -> Tensor:
    """Attention of the newest token over what the layer returned; it keeps nothing that the token may not see.

    Args:
        query: [B, Hq, 1, D].
        keys, values: [B, H, n, D], the newest n tokens, the token itself included; padding is among them.
        member: the cache that the layer belongs to.
        seen: its tokens, the new one included.
        scaling: factor of the scores.

    Returns:
        [B, 1, Hq, Dv].
    """
    grouped = query.shape[1] != keys.shape[1]
    real = _real(member, seen, keys.shape[-2], keys.device)
    output = F.scaled_dot_product_attention(query, keys, values, attn_mask=real, scale=scaling, enable_gqa=grouped)
    return output.transpose(1, 2).contiguous()


def _real(member: CompressedCache, seen: int, newest: int, device: torch.device) -> Tensor | None:
    """bool [B, 1, 1, n], False where one of the newest n tokens is padding; None where none is."""
    padding = member.placed.padding
    known = member.full_prompt.real if padding is None else padding[:, : seen - 1]
    known = known.to(device)[:, seen - newest :]
    if known.shape[1] == 0 or bool(known.all()):
        return None
    return torch.cat([known, known.new_ones(len(known), newest - known.shape[1])], -1)[:, None, None]

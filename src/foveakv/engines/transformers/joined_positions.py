"""Where the next token of a cache's sequences is: its position ids, and padding among the stored tokens.

In a joined decode step every row has a length of its own, so the model cannot derive positions from the cache.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import causal_mask_function

from foveakv.engines.transformers.cache import CompressedCache
from foveakv.engines.transformers.masks import LazyMask
from foveakv.engines.transformers.placed import Placed


def noted_places(cache: CompressedCache, arguments: Mapping[str, Any]) -> Placed:
    """Before a forward pass of one cache: what its `placed` is with what the arguments say of positions and padding."""
    placed = copy.copy(cache.placed)
    tokens = next((arguments[name] for name in ("input_ids", "inputs_embeds") if arguments.get(name) is not None), None)
    if tokens is not None:
        batch, new = tokens.shape[:2]
        placed.note(arguments, cache.seen, batch, new, cache.prompt_columns if cache.prefilled else None)
    return placed


def next_positions(cache: CompressedCache, device: torch.device) -> Tensor:
    """The position of each sequence's next token, int64 [B, 1]; the same on all axes, as text has it.

    Position ids that were passed are continued. Otherwise, as the models do: an M-RoPE offset is added to the number of
    real tokens; without one, padding counts.
    """
    shift = cache.placed.shift
    batch = cache.full_prompt.batch
    if shift is not None:
        return (shift.to(device) + cache.seen)[:, None]
    delta = next((value for value in cache.model_state if isinstance(value, Tensor)), None)
    if delta is None:
        return torch.full((batch, 1), cache.seen, device=device)
    prompt = cache.full_prompt
    real = prompt.lengths.to(device) + (cache.seen - prompt.kinds.shape[1])
    if cache.placed.padding is not None:
        padding = cache.placed.padding[:, : cache.seen]
        real = padding.sum(-1).to(device) + (cache.seen - padding.shape[1])
    return real[:, None] + delta.to(device).reshape(-1, 1).repeat_interleave(batch // delta.numel(), 0)


def padding_of(cache: CompressedCache) -> LazyMask | None:
    """The mask of one new token in each sequence where a token stored after the prompt is padding, else None."""
    padding = cache.placed.padding
    if padding is None:
        return None
    known = padding[:, : cache.seen]  # shorter after a crop
    ones = known.new_ones(len(known), cache.seen + 1 - known.shape[1])
    return LazyMask("sdpa", {"attention_mask": torch.cat([known, ones], -1), "mask_function": causal_mask_function})

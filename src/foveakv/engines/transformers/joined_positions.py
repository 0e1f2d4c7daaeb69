"""Where the next token of a cache's sequences is: its position ids, and padding among the stored tokens.

In a joined decode step every row has a length of its own, so the model cannot derive positions from the cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import causal_mask_function

from foveakv.engines.transformers.masks import LazyMask


class Placed:
    """What the passes over a prompt and later turns said of positions and padding.

    shift: int64 [B], position of the next token - tokens seen; None: no position ids were passed, so the model derived
    them from its cache. It stays the same while single tokens are decoded. padding: bool [B, columns], False where a
    token after the prompt is padding; None: no such token is.
    """

    def __init__(self) -> None:
        self.shift: Tensor | None = None
        self.padding: Tensor | None = None

    def note(self, arguments: Mapping[str, Any], before: int, new: int, prompt_columns: int | None) -> None:
        """Before a forward pass: tokens seen before, new tokens, columns of the prompt (None: it is being read)."""
        if new == 1 and prompt_columns is not None:
            return
        positions, mask = arguments.get("position_ids"), arguments.get("attention_mask")
        if isinstance(positions, Tensor):
            # With four axes the first is the token's index, which text models use for their masks only.
            axes = positions[None] if positions.ndim == 2 else positions[-3:]
            following = axes.long().amax((0, -1)) + 1
            if self.shift is not None and len(self.shift) == len(following):
                # A chunk that begins inside an image may end at a lower position than the one before it.
                following = torch.maximum(following, self.shift + before)
            self.shift = following - (before + new)
        if prompt_columns is None or not isinstance(mask, Tensor) or mask.ndim != 2 or mask.shape[1] != before + new:
            return
        if self.padding is not None or not bool(mask[:, prompt_columns:].all()):
            self.padding = mask.bool()

    def select(self, index: Tensor) -> None:
        """Sequence b becomes the former sequence `index[b]`."""
        for name in ("shift", "padding"):
            value = getattr(self, name)
            if value is not None:
                setattr(self, name, value[index.to(value.device)])


def note_places(cache: Any, arguments: Mapping[str, Any]) -> None:
    """Before a forward pass of one cache: keep what its arguments say of positions and padding."""
    tokens = next((arguments[name] for name in ("input_ids", "inputs_embeds") if arguments.get(name) is not None), None)
    if tokens is not None:
        cache.placed.note(arguments, cache.seen, tokens.shape[1], cache.prompt_columns if cache.prefilled else None)


def next_positions(cache: Any, device: torch.device) -> Tensor:
    """The position of each sequence's next token, int64 [B, 1]; the same on all axes, as text has it.

    Position ids that were passed are continued. Otherwise, as the models do: an M-RoPE offset is added to the number of
    real tokens; without one, padding counts.
    """
    shift = cache.placed.shift
    batch = cache.full_prompt.batch
    if shift is not None:
        shift = shift if len(shift) == batch else shift.expand(batch)
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


def padding_of(cache: Any) -> LazyMask | None:
    """The mask of one new token in each sequence where a token stored after the prompt is padding, else None."""
    padding = cache.placed.padding
    if padding is None:
        return None
    known = padding[:, : cache.seen]  # shorter after a crop
    ones = known.new_ones(len(known), cache.seen + 1 - known.shape[1])
    return LazyMask("sdpa", {"attention_mask": torch.cat([known, ones], -1), "mask_function": causal_mask_function})

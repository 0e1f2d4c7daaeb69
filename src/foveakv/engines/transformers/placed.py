"""What a cache remembers of its passes' position ids and padding, for joined decode steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


class Placed:
    """What the passes over a prompt and later turns said of positions and padding.

    shift: int64 [B], position of the next token - tokens seen; None: no position ids were passed, so the model derived
    them from its cache. It stays the same while single tokens are decoded. padding: bool [B, columns], False where a
    token after the prompt is padding; None: no such token is.
    """

    def __init__(self) -> None:
        self.shift: Tensor | None = None
        self.padding: Tensor | None = None

    def note(self, arguments: Mapping[str, Any], before: int, batch: int, new: int, prompt_columns: int | None) -> None:
        """Before a forward pass: tokens seen before, sequences, new tokens, columns of the prompt (None: being read).

        Tensors are replaced, never written to.
        """
        if new == 1 and prompt_columns is not None:
            return
        positions, mask = arguments.get("position_ids"), arguments.get("attention_mask")
        if isinstance(positions, Tensor):
            # With four axes the first is the token's index, which text models use for their masks only.
            axes = positions[None] if positions.ndim == 2 else positions[-3:]
            following = axes.long().amax((0, -1)) + 1
            if len(following) == 1:
                following = following.expand(batch)  # position_ids [1, q] hold for all sequences
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

"""What a cache has read: token ids, and digests of images and other inputs. Recorded for caches that can be saved."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

# Arguments of a pass that say nothing about its content beyond the token ids.
_NO_CONTENT = (
    "input_ids", "attention_mask", "position_ids", "cache_position", "past_key_values", "cache", "labels",
    "mm_token_type_ids", "token_type_ids", "logits_to_keep",
)  # fmt: skip


class Contents:
    """The inputs of all passes so far.

    tokens: int64 [B, q] of every pass, -1 for embeddings. inputs: for every pass that had other tensors, the number of
    its first token and the digests of these by name.
    """

    def __init__(self) -> None:
        self.tokens: list[Tensor] = []
        self.inputs: list[tuple[int, dict[str, str]]] = []

    def note(self, ids: Tensor, digests: Mapping[str, str]) -> None:
        """Record a pass over ids [B, q] with other inputs of these digests, after it has ended."""
        if digests:
            self.inputs.append((sum(each.shape[1] for each in self.tokens), dict(digests)))
        self.tokens.append(ids.detach().to(torch.int64, copy=True))

    def first(self) -> dict[str, str]:
        """The digests of the first pass."""
        return next((digests for start, digests in self.inputs if start == 0), {})

    def select(self, index: Tensor) -> None:
        """Sequence b becomes the former sequence index[b]; int64 [B']."""
        self.tokens = [self.ids().index_select(0, index.to(self.tokens[0].device))] if self.tokens else []

    def crop(self, seen: int) -> None:
        """Forget all tokens from number `seen` on."""
        self.tokens = [self.ids()[:, :seen]] if self.tokens else []
        self.inputs = [(start, digests) for start, digests in self.inputs if start < seen]

    def ids(self) -> Tensor:
        """Token ids of all that has been read: int64 [B, seen]."""
        if len(self.tokens) > 1:
            self.tokens = [torch.cat(self.tokens, 1)]
        return self.tokens[0]


def digests_of(arguments: Mapping[str, Any]) -> dict[str, str]:
    """Return a digest for each tensor among named arguments that is content: images, grids, embeddings and the like."""
    return {
        name: digest(value)
        for name, value in sorted(arguments.items())
        if isinstance(value, Tensor) and name not in _NO_CONTENT
    }


def digest(tensor: Tensor) -> str:
    """Return a digest of a tensor's dtype, shape and values: 64 hex digits."""
    found = hashlib.blake2b(f"{tensor.dtype} {tuple(tensor.shape)} ".encode(), digest_size=32)
    flat = tensor.detach().cpu().contiguous().flatten()
    found.update(flat.view(torch.uint8).numpy().data if flat.numel() else b"")
    return found.hexdigest()

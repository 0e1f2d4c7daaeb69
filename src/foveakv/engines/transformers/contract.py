"""What layers need of the cache that owns them, and what attention needs of a layer.

These protocols keep imports one-way: the cache imports its layers, and the layers know only these.
"""

from __future__ import annotations

import weakref
from typing import Any, Protocol

import torch
from torch import Tensor

from foveakv.core.prompt import PromptMap
from foveakv.engines.transformers.blocks import Block, BlockReport
from foveakv.engines.transformers.decisions import Storage
from foveakv.engines.transformers.masks import Mask
from foveakv.methods.base import Method
from foveakv.methods.views import PromptView, State


class Attending(Protocol):
    """A layer that our attention function calls through its `KVHandle`. layer_idx: the model's index of the layer."""

    layer_idx: int

    @property
    def cache(self) -> OwningCache:
        """The cache that owns the layer."""

    def attend(self, query: Tensor, mask: Mask | None, scaling: float) -> Tensor:
        """Attention of query [B, Hq, q, D] over the stored slots; returns [B, q, Hq, Dv]."""

    def end_prefill(self, query: Tensor, handle: Any, mask: Mask | None, scaling: float) -> None:
        """Called after the dense attention of a prefill chunk."""


class OwningCache(Protocol):
    """The cache as its layers see it; see `CompressedCache` for the meaning of each attribute."""

    method: Method
    state: State | None
    storage: Storage
    backend: str
    max_decode_slots: int | None
    trace: list[dict[int, Tensor]] | None
    forward_tokens: int | None
    last_chunk: bool
    block: Block | None
    blocks: list[BlockReport]
    undecided: bool
    owner: weakref.ref[Any] | None

    @property
    def compressed(self) -> list[Any]:
        """The compressed layers, in model order."""

    @property
    def request(self) -> PromptView:
        """Facts about the whole prompt."""

    @property
    def full_prompt(self) -> PromptMap:
        """What every prompt column is."""

    @property
    def prompt_columns(self) -> int:
        """Width of the prompt."""

    @property
    def seen(self) -> int:
        """Tokens in the context so far."""

    @property
    def preallocated(self) -> int | None:
        """Decoded tokens that fit into preallocated slots."""

    def columns(self, compressed_idx: int) -> tuple[PromptMap, Tensor, bool]:
        """The prompt as a layer sees it."""

    def new_positions(self, seen: int, new: int, device: torch.device) -> Tensor:
        """Positions of the newest tokens, int32 [1, new]."""

    def note_peak(self, more: int = 0) -> None:
        """Records the present bytes."""

    def prune_stream(self, keep: Tensor, compressed_idx: int) -> None:
        """Takes tokens out of the residual stream."""

    def end_layer(self, layer: Any) -> None:
        """One layer's prefill is done."""

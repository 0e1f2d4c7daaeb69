"""Sizes of a cache: its geometry, from the model's config, and the bytes of its layers."""

from __future__ import annotations

import warnings
from typing import Any

from torch import Tensor

from foveakv.core.budget import Geometry
from foveakv.core.prompt import PromptMap


def geometry_of(config: Any, prompt: PromptMap, layers: int, itemsize: int) -> Geometry:
    """Return the geometry of a cache.

    Args:
        config: config of the text decoder.
        prompt: map of the prompt.
        layers: number of compressed layers.
        itemsize: bytes of one key element.
    """
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    dim = head_dim(config)
    return Geometry(
        batch=len(prompt.kinds), contexts=prompt.lengths.cpu(), layers=layers, kv_heads=heads,
        head_dim=dim, value_dim=dim, itemsize=itemsize,
    )  # fmt: skip


def head_dim(config: Any) -> int:
    """Return the dimension of keys and values, from the config of the text decoder."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def positions_of(config: Any) -> int:
    """Return the number of positions that the text decoder was made for; 0 if its config does not say."""
    return int(getattr(config, "max_position_embeddings", 0) or 0)


def warn_beyond_positions(config: Any, seen: int, new: int) -> None:
    """Warn once, when `new` tokens after `seen` others take the context past the model's positions."""
    positions = positions_of(config)
    if positions and seen <= positions < seen + new:
        warnings.warn(
            f"the context grows to {seen + new} tokens, and this model has {positions} positions "
            "(max_position_embeddings); its answers may be wrong from here on",
            stacklevel=2,
        )


def layer_nbytes(layer: Any) -> int:
    """Return the storage bytes of a cache layer on the device, compressed or not; shared storage counts once."""
    own: int | None = getattr(layer, "device_nbytes", None)  # layers of transformers have no such property
    if own is not None:
        return own
    fields = vars(layer).values()
    states = [state for value in fields if isinstance(value, dict) for state in value.values()]  # of linear attention
    tensors = [value for value in (*fields, *states) if isinstance(value, Tensor)]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())

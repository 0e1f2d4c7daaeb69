"""The only module that knows differences between transformers versions."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any

import transformers
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer
from transformers.generation import utils as generation
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from foveakv.errors import UnsupportedModelError

__all__ = ["Cache", "CacheLayerMixin", "DynamicCache", "DynamicLayer", "PreTrainedModel"]

VERSION: str = transformers.__version__
CACHE_NAMES = ("cache", "past_key_values")


def cache_argument(model: PreTrainedModel) -> str:
    """The name under which this model's forward takes its cache: `cache` since 5.24, `past_key_values` before."""
    parameters = inspect.signature(model.forward).parameters
    for name in CACHE_NAMES:
        if name in parameters:
            return name
    raise UnsupportedModelError(
        f"{type(model).__name__}.forward takes no key-value cache, so there is none to compress"
    )


def decoder_of(model: PreTrainedModel) -> PreTrainedModel:
    """The text decoder whose layers hold the KV cache."""
    decoder = model.get_decoder()
    if not hasattr(decoder, "layers"):
        raise UnsupportedModelError(f"{type(model).__name__} has no text decoder with a list of layers to compress")
    return decoder


def text_config_of(model: PreTrainedModel) -> Any:
    """The config of the text decoder."""
    return decoder_of(model).config


def default_layers(config: Any) -> list[Any]:
    """The cache layers that transformers itself would use, in model order; the plain ones are `DynamicLayer`."""
    return list(DynamicCache(config=config).layers)


def set_text_attention(model: PreTrainedModel, name: str) -> None:
    """Switches the text decoder alone to the attention implementation `name`; towers keep theirs."""
    config = text_config_of(model)
    model.set_attn_implementation(_nested(model.config, config, name))
    if config._attn_implementation != name:
        raise UnsupportedModelError(
            f"{type(model).__name__} does not let its attention be replaced through transformers' AttentionInterface"
        )


def _nested(root: Any, target: Any, name: str) -> dict[str, Any]:
    if root is target:
        return {"": name}
    for key in getattr(root, "sub_configs", {}):
        child = getattr(root, key, None)
        if child is target:
            # A dict value keeps the implementation of whatever is nested inside the text config.
            return {key: name}
        if child is not None and getattr(child, "sub_configs", None):
            try:
                return {key: _nested(child, target, name)}
            except UnsupportedModelError:
                continue
    raise UnsupportedModelError(f"no sub-config of {type(root).__name__} belongs to its text decoder")


def base_attention(name: str, module: nn.Module) -> Callable[..., Any]:
    """The attention function `name` as the model's own module would resolve it."""
    if name == "eager":
        return sys.modules[type(module).__module__].eager_attention_forward
    return ALL_ATTENTION_FUNCTIONS[name]


def base_mask(name: str) -> Callable[..., Any] | None:
    """The mask function that goes with attention implementation `name`; None where it takes no mask."""
    if name == "eager":
        return eager_mask
    return ALL_MASK_ATTENTION_FUNCTIONS.get(name)


def register_attention(name: str, attention: Callable[..., Any], mask: Callable[..., Any]) -> None:
    """Adds an implementation to transformers' two registries (their extension point; nothing is replaced)."""
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, mask)


def lost_in_chunks(inputs: Mapping[str, Any]) -> list[str]:
    """The image, video and audio inputs that this transformers drops when a prompt is read in chunks.

    Versions that can encode them before the first chunk list `mm_encoder_outputs` among the names of the prefill.
    """
    media = generation.MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL
    if "mm_encoder_outputs" in media:
        return []
    return [name for name in media if inputs.get(name) is not None]


def own_cache_class(model: PreTrainedModel) -> bool:
    """Whether the model needs a cache class of its own and cannot run with a `DynamicCache`."""
    return not model._supports_default_dynamic_cache()


def misplaces_guidance(model: PreTrainedModel) -> bool:
    """Whether classifier-free guidance fails in transformers itself for this model.

    M-RoPE models build the position ids of a pass without any from the whole attention mask, which is longer than the
    new tokens in the unconditional branch.
    """
    return any("rope_deltas" in vars(module) for module in model.modules())


def tokens_to_remove(amount: Any, seen: int) -> int:
    """`crop(n)`: n < 0 removes |n| tokens; n > 0 was, in older versions, the length to keep (a tensor at times)."""
    amount = int(amount)
    return -amount if amount <= 0 else max(seen - amount, 0)

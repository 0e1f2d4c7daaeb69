"""Token pruning in the residual stream, so that later layers do not compute evicted tokens.

Hooks on the decoder layers shorten the inputs of layer k + 1 and all later layers during the prefill. The output of the
last layer is scattered back to the length of the prompt, with zeros for pruned tokens, whose logits are meaningless.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from foveakv.engines.transformers import compat
from foveakv.engines.transformers.cache import CompressedCache
from foveakv.engines.transformers.masks import LazyMask, SubsetMask, as_mask
from foveakv.errors import UnsupportedModeError, UnsupportedModelError


def check_supported(model: compat.PreTrainedModel) -> None:
    """Check that the model supports token pruning.

    Raises:
        UnsupportedModelError: a layer needs all tokens of the prompt.
    """
    config = model.config
    if any(type(layer) is not compat.DynamicLayer for layer in compat.default_layers(compat.text_config_of(model))):
        raise UnsupportedModelError(
            f"{type(model).__name__} has sliding-window or linear-attention layers, which need all tokens of the "
            "prompt; use drop_hidden_states=False"
        )
    vision = getattr(config, "vision_config", None)
    if getattr(vision, "deepstack_visual_indexes", None):
        raise UnsupportedModelError(
            f"{type(config).__name__} adds visual features to several early layers (deepstack), which needs every "
            "visual token in the residual stream; use drop_hidden_states=False"
        )


def install(layers: nn.ModuleList, active: Callable[[], CompressedCache | None]) -> list[RemovableHandle]:
    """Register the hooks on all layers.

    Args:
        layers: the decoder layers.
        active: returns the cache of the running forward pass, or None.

    Returns:
        The handles that remove the hooks.
    """

    def shorten(layer_idx: int) -> Callable[..., Any]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            cache = active()
            if cache is None or cache.stream is None or layer_idx < _first_shortened(cache):
                return None
            index = cache.stream.index
            kwargs = dict(kwargs)
            hidden = args[0] if args else kwargs["hidden_states"]
            if layer_idx == _first_shortened(cache):  # later layers receive shortened inputs already
                hidden = _take(hidden, index)
            if args:
                args = (hidden, *args[1:])
            else:
                kwargs["hidden_states"] = hidden
            if kwargs.get("position_embeddings") is not None:
                kwargs["position_embeddings"] = tuple(_take(t, index) for t in kwargs["position_embeddings"])
            if kwargs.get("position_ids") is not None:
                kwargs["position_ids"] = _take(kwargs["position_ids"][..., None], index)[..., 0]
            kwargs["attention_mask"] = _subset(cache, kwargs.get("attention_mask"))
            return args, kwargs

        return hook

    def restore(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        cache = active()
        if cache is None or cache.stream is None:
            return None
        hidden = output[0] if isinstance(output, tuple) else output
        index, valid = cache.stream.index, cache.stream.valid
        if hidden.shape[1] == index.shape[1]:
            full = hidden.new_zeros(hidden.shape[0], cache.prompt_columns, hidden.shape[2])
            batch = torch.arange(len(index), device=index.device)[:, None].expand_as(index)
            full[batch[valid], index[valid]] = hidden[valid]
            hidden = full
        cache.stream = None  # only the prefill is shortened
        return (hidden, *output[1:]) if isinstance(output, tuple) else hidden

    handles = [
        layer.register_forward_pre_hook(shorten(idx), with_kwargs=True) for idx, layer in enumerate(layers) if idx > 0
    ]
    handles.append(layers[-1].register_forward_hook(restore))
    return handles


def _first_shortened(cache: CompressedCache) -> int:
    """Return the index of the first decoder layer with shortened inputs."""
    after = cache.method.prunes_after
    return len(cache.layers) if after is None else cache.compressed[after].layer_idx + 1


def _take(tensor: Tensor, index: Tensor) -> Tensor:
    """Gather tokens [..., B or 1, C, D] by index [B, n] into [..., B, n, D]."""
    batch = len(index)
    tensor = tensor.expand(*tensor.shape[:-3], batch, *tensor.shape[-2:])
    where = index[..., None].expand(*tensor.shape[:-3], *index.shape, tensor.shape[-1])
    return tensor.gather(-2, where)


def _subset(cache: CompressedCache, attention_mask: Any) -> SubsetMask:
    """Return the mask of the shortened sequence, shared by the layers that receive the same full mask."""
    whole = as_mask(attention_mask)
    if isinstance(whole, SubsetMask):
        return whole
    if not isinstance(whole, LazyMask) or cache.stream is None:
        raise UnsupportedModeError(
            "drop_hidden_states needs a 2-D attention mask or none, not one prepared by the caller"
        )
    masks = cache.stream.masks
    if id(whole) not in masks:
        masks[id(whole)] = SubsetMask(whole, cache.stream.index, cache.stream.valid)
    return masks[id(whole)]

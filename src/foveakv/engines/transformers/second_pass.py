"""A second pass over the prompt: the model reads the whole prompt again, after itself.

Methods that score slots by the attention from a repetition of the context (KVzip, arXiv 2505.23416) observe it. The
decoder runs once more with the inputs of the first pass, at positions after those of the prompt. Keys and values of the
second pass are not stored. Those of the prompt are stored in full until the layer's second pass is complete.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.hooks import RemovableHandle

from foveakv.engines.transformers import compat
from foveakv.errors import UnsupportedModeError, UnsupportedModelError

_ROWS = 256  # query rows per attention call, to bound the size of the mask


def check_supported(model: compat.PreTrainedModel) -> None:
    """Check that all layers are compressed; other layers would store the second pass as new tokens.

    Raises:
        UnsupportedModelError: a layer has sliding-window or linear attention.
    """
    if any(type(layer) is not compat.DynamicLayer for layer in compat.default_layers(compat.text_config_of(model))):
        raise UnsupportedModelError(
            f"{type(model).__name__} has sliding-window or linear-attention layers, which do not support a second "
            "pass over the prompt; use a method without a second pass"
        )


@dataclass
class FirstPass:
    """Inputs of the decoder in the first pass."""

    arguments: dict[str, Any] = field(default_factory=dict)

    def record(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Record the inputs (called by a forward pre-hook of the decoder).

        Raises:
            UnsupportedModeError: the decoder is called with positional arguments.
        """
        if args:
            raise UnsupportedModeError(
                f"{type(module).__name__} is called with positional arguments, which a second pass over the prompt "
                "does not support; use a method without a second pass"
            )
        self.arguments = dict(kwargs)


def install(decoder: nn.Module, active: Callable[[], FirstPass | None]) -> RemovableHandle:
    """Register the hook on the decoder and return its handle.

    active: returns the object that records the running pass, or None.
    """

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        first = active()
        if first is not None:
            first.record(module, args, kwargs)

    return decoder.register_forward_pre_hook(hook, with_kwargs=True)


def run(decoder: nn.Module, first: FirstPass, seen: int) -> None:
    """Run the decoder over the prompt again. seen: number of prompt columns."""
    arguments = dict(first.arguments)
    first.arguments = {}
    reference = arguments.get("inputs_embeds")
    if reference is None:
        reference = arguments["input_ids"]
    positions = arguments.get("position_ids")
    if positions is None:
        positions = torch.arange(seen, device=reference.device).expand(reference.shape[0], seen)
        arguments["position_ids"] = positions + seen
    else:
        last = positions.amax(-1, keepdim=True)
        if positions.ndim == 3:  # several axes: time, height, width
            last = last.amax(0, keepdim=True)
        arguments["position_ids"] = positions + last + 1
    arguments["attention_mask"] = None  # `attend_twice` masks the padding
    arguments.pop("position_embeddings", None)
    with torch.no_grad():
        decoder(**arguments)


def attend_twice(
    query: Tensor, keys: tuple[Tensor, Tensor], values: tuple[Tensor, Tensor], real: Tensor, scaling: float
) -> Tensor:
    """Attend in the second pass: row c attends to the whole prompt and to columns 0 ... c of the second pass.

    Args:
        query: [B, Hq, C, D].
        keys, values: those of the prompt and of the second pass, [B, H, C, D] and [B, H, C, Dv] each.
        real: bool [B, C], False for padding.
        scaling: the factor of q . k.

    Returns:
        [B, Hq, C, Dv].
    """
    columns = query.shape[2]
    group = query.shape[1] // keys[0].shape[1]
    all_keys, all_values = (torch.cat(pair, 2).repeat_interleave(group, 1) for pair in (keys, values))
    column = torch.arange(columns, device=query.device)
    parts = []
    for start in range(0, columns, _ROWS):
        rows = column[start : start + _ROWS, None]
        own = (column <= rows) & (real[:, None, None] | (column == rows))  # padding rows see themselves
        mask = torch.cat([real[:, None, None].expand(-1, 1, len(rows), -1), own], -1)
        part = query[:, :, start : start + _ROWS]
        parts.append(F.scaled_dot_product_attention(part, all_keys, all_values, attn_mask=mask, scale=scaling))
    return torch.cat(parts, 2)

"""Identify a model by its text decoder: type, geometry, and a sample of its weights."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterable
from typing import Any

import torch

from foveakv.engines.transformers import compat
from foveakv.methods.base import ModelFacts

_VALUES = 8  # sampled values of each parameter
_GEOMETRY = (
    "num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
)  # fmt: skip


def digest_of(model: compat.PreTrainedModel) -> str:
    """Return the digest of a model, see `digest`.

    Parameters on the meta device (offloaded by accelerate) and distributed ones (DTensor) count by shape only.
    """
    return digest(compat.text_config_of(model), sorted(compat.decoder_of(model).named_parameters()))


def digest(config: Any, parameters: Iterable[tuple[str, torch.Tensor]]) -> str:
    """Return the SHA-256 of a text decoder's type, geometry and a few values of every parameter: 64 hex digits.

    Values are rounded to bfloat16 first, so that a checkpoint has one digest in float32 and in bfloat16. float16 and
    quantized weights may give another one.

    Args:
        config: the decoder's configuration.
        parameters: names, as in the decoder, and values, in the order of names.
    """
    found = hashlib.sha256()
    geometry = {name: getattr(config, name, None) for name in _GEOMETRY}
    found.update(json.dumps([config.model_type, geometry], sort_keys=True).encode())
    for name, parameter in parameters:
        found.update(json.dumps([name, list(parameter.shape)]).encode())
        count = min(_VALUES, parameter.numel())
        if not count or parameter.is_meta or hasattr(parameter, "full_tensor"):
            continue
        flat = parameter.detach().reshape(-1)
        places = torch.linspace(0, flat.numel() - 1, count, dtype=torch.float64).long().to(flat.device)
        # Adding 0 turns -0 into 0.
        values = flat[places].to(torch.bfloat16).cpu() + 0.0
        found.update(values.view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def facts_of(model: compat.PreTrainedModel) -> ModelFacts:
    """Return what methods may know of the model before the first prompt."""
    config = compat.text_config_of(model)
    layers = compat.default_layers(config)
    compressed = tuple(idx for idx, layer in enumerate(layers) if type(layer) is compat.DynamicLayer)
    return ModelFacts(compressed, len(layers), str(config.model_type), functools.partial(digest_of, model))

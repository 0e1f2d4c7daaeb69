"""Save a compressed cache to a file: `cache.save(path)`; `loading.py` reads it.

A file is in the safetensors format: slots in use, quantized as they are stored, and JSON in its header. It is keyed by
the model, the version of transformers, the method and its options, and what was read: token ids, digests of images.
"""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from safetensors.torch import save_file

from foveakv.engines.transformers import compat
from foveakv.engines.transformers.fingerprint import digest_of
from foveakv.engines.transformers.packing import Packer
from foveakv.errors import CacheInUseError, StoreError, UnsupportedModeError
from foveakv.methods import Method

FORMAT = 1
HEADER = "foveakv"
# Attributes of a cache that are not part of its file: they belong to this process, are derived, or are set by loading.
NOT_SAVED = (
    "layers", "layer_class_to_replicate", "offloading", "config", "method", "options", "storage", "owner", "hold",
    "preallocated", "backend", "max_decode_slots", "kv_dtype", "residual_length", "trace_wanted", "trace", "clock",
    "stream", "block", "forward_tokens", "last_chunk", "_prefilling", "_started", "_new_positions", "only_non_sliding",
    "prefetch_stream", "_is_user_defined",
)  # fmt: skip
NOT_OF_LAYERS = ("_cache", "_dense", "_queries", "_first_pass")


def save(cache: Any, path: str | os.PathLike[str], more: dict[str, Any] | None = None) -> None:
    """See `CompressedCache.save`; cache: a `CompressedCache`, whose module imports this one.

    more: further entries of the header, which loading the cache does not read.
    """
    if cache.contents is None:
        raise UnsupportedModeError(
            "this cache has not recorded what it read, so its file could be loaded for another prompt; make it with "
            "saveable=True"
        )
    if cache.preallocated is not None:
        raise UnsupportedModeError("a cache with preallocated slots cannot be saved; make it without preallocate")
    if cache.forward_tokens is not None or not cache.prefilled:
        raise CacheInUseError(
            "the prompt of this cache is not complete, or its latest pass failed; save it after a pass"
        )
    packer = Packer()
    layers = [
        {name: packer.pack(value, f"layer {number}, {name}") for name, value in _layer_contents(layer).items()}
        for number, layer in enumerate(cache.layers)
    ]
    contents = {
        name: packer.pack(value, f"its {name}")
        for name, value in vars(cache).items()
        if name not in (*NOT_SAVED, "contents")
    }
    ids = cache.contents.ids()
    header = {
        **(more or {}),
        "format": FORMAT,
        "key": _key(cache),
        "inputs": cache.contents.inputs,
        "tokens": packer.pack(ids, "its tokens"),
        "cache": contents,
        "layers": layers,
    }
    _write(Path(path), packer.tensors, {HEADER: json.dumps(header)})


def settings_of(method: Method) -> dict[str, Any]:
    """The name and the options of a method as JSON has them.

    Raises:
        StoreError: an option cannot be written as JSON.
    """
    options = {field.name: getattr(method, field.name) for field in dataclasses.fields(method) if field.init}
    try:
        plain: dict[str, Any] = json.loads(json.dumps({"method": method.name, **options}))
    except (TypeError, ValueError) as error:
        raise StoreError(f"{method.name} cannot be saved: an option is not a plain value ({error})") from error
    return plain


def facts_of_model(model: compat.PreTrainedModel) -> dict[str, str]:
    return {
        "model": digest_of(model),
        "transformers": transformers.__version__,
        "device": model.device.type,
        "dtype": str(model.dtype),
    }


def _key(cache: Any) -> dict[str, Any]:
    model = None if cache.owner is None else cache.owner()
    if model is None:
        raise CacheInUseError(
            "the model of this cache has been garbage-collected; save the cache while the model exists"
        )
    options = {
        field.name: getattr(cache.options, field.name)
        for field in dataclasses.fields(cache.options)
        if field.name != "pool"
    }
    return {**facts_of_model(model), "method": settings_of(cache.method), "options": options}


def _layer_contents(layer: Any) -> dict[str, Any]:
    """What is saved of a layer, transformers' own included: all but what is derived or belongs to its cache."""
    return {name: value for name, value in vars(layer).items() if name not in NOT_OF_LAYERS}


def _write(path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> None:
    """Write a file as a whole or not at all."""
    temporary = None
    try:
        handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        os.close(handle)
        save_file(tensors, temporary, metadata=metadata)
        os.replace(temporary, path)
        temporary = None
    except (OSError, SafetensorError) as error:
        raise StoreError(f"cannot write {path}: {error}; choose another path with more room") from error
    finally:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)

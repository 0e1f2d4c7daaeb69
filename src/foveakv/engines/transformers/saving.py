"""Save a compressed cache to a file, and load it for the same model: `cache.save(path)`, `foveakv.load_cache`.

A file is in the safetensors format: slots in use, quantized as they are stored, and JSON in its header. It is keyed by
the model, the version of transformers, the method and its options, and what was read: token ids, digests of images.
"""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from foveakv.engines.transformers import compat
from foveakv.engines.transformers.api import cache_for
from foveakv.engines.transformers.cache import CompressedCache
from foveakv.engines.transformers.contents import Contents, digests_of
from foveakv.engines.transformers.fingerprint import digest_of
from foveakv.engines.transformers.layer import CompressedLayer
from foveakv.engines.transformers.options import CacheOptions
from foveakv.engines.transformers.packing import Packer, Unpacker
from foveakv.errors import CacheInUseError, FoveaKVError, InputError, StoreError, UnsupportedModeError
from foveakv.memory.pool import Pool
from foveakv.methods import Method, get

FORMAT = 1
_HEADER = "foveakv"
# Attributes of a cache that are not part of its file: they belong to this process, are derived, or are set by loading.
NOT_SAVED = (
    "layers", "layer_class_to_replicate", "offloading", "config", "method", "options", "storage", "owner", "hold",
    "preallocated", "backend", "max_decode_slots", "kv_dtype", "residual_length", "trace_wanted", "trace", "clock",
    "stream", "block", "forward_tokens", "last_chunk", "_prefilling", "_started", "_new_positions", "only_non_sliding",
    "prefetch_stream",
)  # fmt: skip
_NOT_OF_LAYERS = ("_cache", "_dense", "_queries", "_first_pass")


def save(cache: CompressedCache, path: str | os.PathLike[str]) -> None:
    """See `CompressedCache.save`."""
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
        "format": FORMAT,
        "key": _key(cache),
        "inputs": cache.contents.inputs,
        "tokens": packer.pack(ids, "its tokens"),
        "cache": contents,
        "layers": layers,
    }
    _write(Path(path), packer.tensors, {_HEADER: json.dumps(header)})


def load_cache(
    path: str | os.PathLike[str],
    model: compat.PreTrainedModel,
    *,
    inputs: Mapping[str, Any] | None = None,
    method: Method | None = None,
    pool: Pool | None = None,
) -> CompressedCache:
    """Load a cache that `cache.save` has written, and continue where it was saved.

    Pass it as `past_key_values` (`cache` since transformers 5.24); `cache.token_ids` has what it has read. Nothing of
    the file is executed.

    Args:
        path: the file.
        model: the model that the cache was made with.
        inputs: what the processor gave for the prompt. It is compared with what the cache has read first.
        method: the method that the cache must have; None: that of the file.
        pool: a pool for its slots; None: buffers of its own.

    Raises:
        StoreError: the file cannot be read, or is no cache.
        InputError: the file is of another model, version of transformers, device, prompt or method; the message says
            what differs.
        MethodError, UnsupportedModelError: as `cache_for`.
        PoolFullError: the pool has too little memory.
    """
    header, tensors = _read(Path(path))
    try:
        key, options = header["key"], header["key"]["options"]
        if header["format"] != FORMAT:
            raise InputError(f"{path} has format {header['format']}, and this version reads format {FORMAT}")
        _compare(path, {name: key[name] for name in ("model", "transformers", "device", "dtype")}, _facts(model))
        saved = get(key["method"]["method"], **{k: v for k, v in key["method"].items() if k != "method"})
        if method is not None:
            _compare(path, key["method"], settings_of(method))
        cache = cache_for(model, saved if method is None else method, options=CacheOptions(**options, pool=pool))
        with torch.inference_mode(False), torch.no_grad():
            _fill(cache, header, Unpacker(tensors, model.device, pool))
    except FoveaKVError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, RuntimeError) as error:
        raise StoreError(f"{path} is damaged, or was not written by this version: {error}") from error
    if inputs is not None:
        _check_inputs(path, cache, inputs)
    return cache


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


def _facts(model: compat.PreTrainedModel) -> dict[str, str]:
    return {
        "model": digest_of(model),
        "transformers": transformers.__version__,
        "device": model.device.type,
        "dtype": str(model.dtype),
    }


def _key(cache: CompressedCache) -> dict[str, Any]:
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
    return {**_facts(model), "method": settings_of(cache.method), "options": options}


def _layer_contents(layer: Any) -> dict[str, Any]:
    """What is saved of a layer: of one that is not compressed, its tensors and plain values."""
    if isinstance(layer, CompressedLayer):
        return {name: value for name, value in vars(layer).items() if name not in _NOT_OF_LAYERS}
    kinds = (torch.Tensor, torch.dtype, torch.device, bool, int, float, str, type(None))
    return {name: value for name, value in vars(layer).items() if isinstance(value, kinds)}


def _fill(cache: CompressedCache, header: Mapping[str, Any], unpacker: Unpacker) -> None:
    if len(header["layers"]) != len(cache.layers):
        raise ValueError("another number of layers")
    for layer, packed in zip(cache.layers, header["layers"], strict=True):
        for name, value in packed.items():
            setattr(layer, name, unpacker.unpack(value))
    for name, value in header["cache"].items():
        if name in NOT_SAVED or not hasattr(cache, name):
            raise ValueError(f"unknown attribute {name!r}")
        setattr(cache, name, unpacker.unpack(value))
    contents = Contents()
    contents.tokens, contents.inputs = [unpacker.unpack(header["tokens"])], header["inputs"]
    cache.contents = contents


def _compare(path: Any, saved: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Raise `InputError` that names what differs."""
    names = sorted({*saved, *given})
    wrong = [name for name in names if saved.get(name) != given.get(name)]
    if wrong:
        said = "; ".join(f"{name}: saved with {saved.get(name)!r}, now {given.get(name)!r}" for name in wrong)
        raise InputError(f"{path} does not fit: {said}")


def _check_inputs(path: Any, cache: CompressedCache, inputs: Mapping[str, Any]) -> None:
    """Raise `InputError` unless the cache has read these inputs first."""
    ids, read = inputs.get("input_ids"), cache.token_ids
    if ids is not None and (
        ids.shape[0] != read.shape[0]
        or ids.shape[1] > read.shape[1]
        or not torch.equal(read[:, : ids.shape[1]].cpu(), ids.to(torch.int64).cpu())
    ):
        raise InputError(f"{path} does not fit: it was saved after another text (token ids differ)")
    given = digests_of(inputs)
    saved: dict[str, str] = cache.contents.inputs[0] if cache.contents is not None and cache.contents.inputs else {}
    wrong = [name for name in given if saved.get(name) != given[name]]
    missing = [name for name in saved if name not in given]
    if wrong or missing:
        names = ", ".join([*wrong, *missing])
        raise InputError(f"{path} does not fit: it was saved after other images or other inputs ({names} differ)")


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


def _read(path: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    try:
        with safe_open(path, framework="pt") as file:
            text = (file.metadata() or {}).get(_HEADER)
            if text is None:
                raise StoreError(f"{path} is not a saved cache")
            header = json.loads(text)
            return header, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, no mapping
    except (OSError, SafetensorError, json.JSONDecodeError) as error:
        raise StoreError(f"cannot read {path}: {error}") from error

"""Load a cache that `cache.save` has written: `foveakv.load_cache`."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from foveakv.engines.transformers import compat
from foveakv.engines.transformers.api import cache_for
from foveakv.engines.transformers.cache import CompressedCache
from foveakv.engines.transformers.contents import Contents, digests_of
from foveakv.engines.transformers.options import CacheOptions
from foveakv.engines.transformers.packing import Unpacker
from foveakv.engines.transformers.saving import FORMAT, HEADER, NOT_OF_LAYERS, NOT_SAVED, facts_of_model, settings_of
from foveakv.errors import FoveaKVError, InputError, StoreError
from foveakv.memory.pool import Pool
from foveakv.methods import Method, get


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
        _compare(
            path, {name: key[name] for name in ("model", "transformers", "device", "dtype")}, facts_of_model(model)
        )
        if method is None:
            method = get(key["method"]["method"], **{k: v for k, v in key["method"].items() if k != "method"})
        else:  # it need not be registered
            _compare(path, key["method"], settings_of(method))
        cache = cache_for(model, method, options=CacheOptions(**options, pool=pool))
        with torch.inference_mode(False), torch.no_grad():
            _fill(cache, header, Unpacker(tensors, model.device, pool))
    except FoveaKVError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, RuntimeError) as error:
        raise StoreError(f"{path} is damaged, or was not written by this version: {error}") from error
    if inputs is not None:
        _check_inputs(path, cache, inputs)
    return cache


def _fill(cache: CompressedCache, header: Mapping[str, Any], unpacker: Unpacker) -> None:
    if len(header["layers"]) != len(cache.layers):
        raise ValueError("another number of layers")
    for layer, packed in zip(cache.layers, header["layers"], strict=True):
        for name, value in packed.items():
            # Layers of transformers get some attributes with their first pass only.
            if name in NOT_OF_LAYERS or (name not in vars(layer) and hasattr(layer, name)):
                raise ValueError(f"unknown attribute {name!r}")
            setattr(layer, name, unpacker.unpack(value))
    for name, value in header["cache"].items():
        if name in (*NOT_SAVED, "contents") or name not in vars(cache):
            raise ValueError(f"unknown attribute {name!r}")
        setattr(cache, name, unpacker.unpack(value))
    contents = Contents()
    contents.tokens = [unpacker.unpack(header["tokens"])]
    contents.inputs = [(int(start), dict(digests)) for start, digests in header["inputs"]]
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
    saved = {} if cache.contents is None else cache.contents.first()
    wrong = [name for name in given if saved.get(name) != given[name]]
    missing = [name for name in saved if name not in given]
    if wrong or missing:
        names = ", ".join([*wrong, *missing])
        raise InputError(f"{path} does not fit: it was saved after other images or other inputs ({names} differ)")


def _read(path: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    try:
        with safe_open(path, framework="pt") as file:
            text = (file.metadata() or {}).get(HEADER)
            if text is None:
                raise StoreError(f"{path} is not a saved cache")
            header = json.loads(text)
            return header, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, no mapping
    except (OSError, SafetensorError, json.JSONDecodeError) as error:
        raise StoreError(f"cannot read {path}: {error}") from error

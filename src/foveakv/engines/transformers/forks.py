"""Copies of a compressed cache: the same state twice, for several continuations of one context."""

from __future__ import annotations

import copy
import weakref
from typing import Any, TypeVar

import torch

from foveakv.errors import CacheInUseError

Cache = TypeVar("Cache", bound=Any)  # a CompressedCache, which imports this module


def fork(cache: Cache) -> Cache:
    """See `CompressedCache.fork`."""
    if cache.forward_tokens is not None:
        raise CacheInUseError(
            "this cache is in the middle of a forward pass, or its last one failed; fork it between passes"
        )
    made: Cache = copy.deepcopy(cache)
    return made


def copied(cache: Cache, memo: dict[int, Any]) -> Cache:
    """`copy.deepcopy(cache)`: the model, the method and the options are shared, and so is a pool with its pages."""
    made: Cache = object.__new__(type(cache))
    memo[id(cache)] = made
    with torch.inference_mode(False):  # copies created under inference_mode must be usable outside of it
        for name, value in vars(cache).items():
            shared = name in ("config", "method", "owner", "hold", "options")
            setattr(made, name, value if shared else copy.deepcopy(value, memo))
    for layer in made.compressed:
        layer._cache = weakref.ref(made)
    if made.hold is not None:
        made.hold(made)
    return made

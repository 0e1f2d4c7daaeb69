"""`compress(model, method)` and `cache_for(model, method)`: the two ways to compress a model's caches."""

from __future__ import annotations

from typing import Any

from foveakv.engines.transformers import compat
from foveakv.engines.transformers.attach import attachment_of
from foveakv.engines.transformers.cache import CompressedCache
from foveakv.engines.transformers.calls import new_cache
from foveakv.engines.transformers.options import CacheOptions, resolve
from foveakv.engines.transformers.session import Session, check_method, fitted
from foveakv.methods import Method


def compress(
    model: compat.PreTrainedModel, method: Method, *, options: CacheOptions | None = None, **given: Any
) -> Session:
    """Compress every cache that `model` makes inside the `with` block, in the thread that enters it.

    Args:
        model: a transformers model with a text decoder, see `foveakv models` for tested families.
        method: e.g. `HAE()`, `HybridKV(budget=0.1)`, or `foveakv.methods.get("snapkv", budget=0.2)`.
        options: the caches' options; or give the fields of `CacheOptions` as keyword arguments, e.g. `trace=True` or
            `kv_dtype="int8"`.

    Assisted decoding (an `assistant_model`, `prompt_lookup_num_tokens`) works with methods that do not evict while
    decoding. It gives the tokens of unassisted decoding, except with methods that choose pages or chunks for each step
    (HybridKV, Quest): a step then verifies several drafted tokens with one choice, which is not the choice that each
    token would have had alone.

    Returns:
        A context manager. The model is attached inside its `with` block only; the report and the cache
        stay available after it.

    Raises:
        MethodError: an option that is unknown, invalid, or not supported by this method or model.
        CacheInUseError: on entering, when the same method object is in use on another model.
        UnsupportedModelError: on entering, when the model's attention cannot be compressed correctly.
    """
    return Session(model, method, resolve(options, given))


def cache_for(
    model: compat.PreTrainedModel, method: Method, *, options: CacheOptions | None = None, **given: Any
) -> CompressedCache:
    """Make a compressed cache to pass as `past_key_values` (`cache` since transformers 5.24), in any thread.

    The model stays attached until the cache is garbage-collected; calls with other caches or none, the unconditional
    branch of `guidance_scale` included, are passed on unchanged.

    Args:
        model: a transformers model with a text decoder.
        method: e.g. `HAE()`.
        options: the cache's options; or give the fields of `CacheOptions` as keyword arguments.

    Returns:
        An empty cache for one prompt and its continuations; `foveakv.Report.of(cache)` has slots, bytes and times.

    Raises:
        MethodError: an option that is unknown, invalid, or not supported by this method or model.
        UnsupportedModelError: the model's attention cannot be compressed correctly.
    """
    check_method(method)
    options = resolve(options, given)
    options.check(method)
    attached = attachment_of(model)
    cache = new_cache(model, fitted(model, method), options)
    cache.hold = attached.hold
    attached.hold(cache)
    return cache

"""The wrapper around `model.generate`: which cache or session a call belongs to, and whether its mode is supported."""

from __future__ import annotations

import functools
import inspect
from typing import Any

from foveakv.engines.transformers.attachment import Original
from foveakv.engines.transformers.cache import CompressedCache
from foveakv.engines.transformers.calls import Call, SessionState, passed_cache
from foveakv.engines.transformers.contents import digests_of
from foveakv.engines.transformers.forward import check_replaceable, session_cache
from foveakv.engines.transformers.generation_modes import (
    call_arguments,
    check_generate,
    check_preallocated,
    prefill_total,
)


def wrap_generate(original: Original, model: Any) -> Any:
    """`model.generate` while it is attached.

    A call is compressed if it brings a compressed cache, or if its thread has an open session; other calls are passed
    on unchanged.
    """

    def generate(*args: Any, **kwargs: Any) -> Any:
        if not original.active:
            return original(*args, **kwargs)
        model, attached = original.model, original.attachment
        named = call_arguments(model, args, kwargs)
        cache = passed_cache(named)
        user: CompressedCache | SessionState
        if isinstance(cache, CompressedCache):
            session, user = attached.session(cache), cache
        else:
            session = attached.session()
            if session is None:
                with attached.entered(None):
                    return original(*args, **kwargs)
            user = session
            if cache is not None:
                check_replaceable(user.method, cache, named)
        options = user.options
        check_generate(model, user.method, named, options.max_decode_slots)
        call = Call(session, generating=True, prompt_total=prefill_total(model, named, cache))
        if options.saveable:
            call.digests = digests_of(named)
        stored = (0, 0)
        if isinstance(cache, CompressedCache):
            call.caches.append(cache)
            call.began = cache.seen
            if cache.clock is not None:
                stored = cache.clock.appended, cache.seen
        if options.preallocated is not None:
            check_preallocated(model, user.method, named, options.preallocated, *stored)
            if session is not None and cache is None:
                # Before the prefill, because that is when `generate` decides whether to compile.
                check_replaceable(user.method, None, named)
                cache = kwargs[attached.cache_name] = session_cache(model, call, session)
        # Position ids are built before the first forward pass, from the offsets of whatever ran last.
        attached.set_model_state(cache.model_state if isinstance(cache, CompressedCache) else None)
        with attached.entered(call):
            return original(*args, **kwargs)

    functools.update_wrapper(generate, type(model).generate)
    generate.__signature__ = inspect.signature(model.generate)  # type: ignore[attr-defined]
    return generate

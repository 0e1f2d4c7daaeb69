"""Compile the decode steps of caches with preallocated slots.

`generate` asks `model.get_compiled_call(config)` for the function that runs a step. The wrapper runs the model
normally, with the checks and the bookkeeping on the host; only the inner `type(model).forward` is compiled.
"""

from __future__ import annotations

from typing import Any

import torch

from foveakv.engines.transformers.attachment import Original
from foveakv.engines.transformers.cache import CompressedCache
from foveakv.engines.transformers.calls import Call, passed_cache
from foveakv.engines.transformers.preallocated import compile_settings


def wrap_get_compiled_call(original: Original, model: Any) -> Any:
    """`model.get_compiled_call` while it is attached."""
    compiled: list[tuple[Any, Any]] = []  # compile settings and what they gave

    def forward_of(model: Any, compile_config: Any) -> Any:
        """The model's forward, compiled: f(model, ...). torch keeps compiled code for longer than this list."""
        settings = compile_settings(model, compile_config)
        for known, made in compiled:
            if known == settings:
                return made
        own = original.attachment.own("forward")
        target = type(model).forward if own is None else lambda model, *args, **kwargs: own(*args, **kwargs)
        made = torch.compile(target, **settings.to_dict())
        compiled.append((settings, made))
        return made

    def get_compiled_call(compile_config: Any = None) -> Any:
        if not original.active:
            return original(compile_config)

        def step(*args: Any, **kwargs: Any) -> Any:
            cache = passed_cache(kwargs)
            if not original.active or not isinstance(cache, CompressedCache) or cache.preallocated is None:
                return original(compile_config)(*args, **kwargs)
            ids = kwargs.get("input_ids")
            model, attached = original.model, original.attachment
            if not cache.prefilled or ids is None or ids.shape[1] != 1:
                return model(*args, **kwargs)
            call = attached.call
            if call is not None and call.generating:
                return _run(model, call, forward_of(model, compile_config), args, kwargs)
            call = Call(session=attached.session(cache))
            with attached.entered(call):
                return _run(model, call, forward_of(model, compile_config), args, kwargs)

        return step

    return get_compiled_call


def _run(model: Any, call: Call, compiled: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    call.compiled = compiled
    try:
        return model(*args, **kwargs)
    finally:
        call.compiled = None

"""Checks of a `generate` call: which of its modes a compressed cache supports."""

from __future__ import annotations

import inspect
from typing import Any

from foveakv.engines.transformers import compat
from foveakv.errors import UnsupportedModeError
from foveakv.methods import Method


def _setting(model: Any, kwargs: dict[str, Any], name: str) -> Any:
    """A generation setting as `generate` resolves it: the argument, then the config passed, then the model's config."""
    if kwargs.get(name) is not None:
        return kwargs[name]
    for config in (kwargs.get("generation_config"), model.generation_config):
        if getattr(config, name, None) is not None:  # what a passed config does not set comes from the model's
            return getattr(config, name)
    return None


def call_arguments(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a `generate` call by name, positional ones included."""
    try:
        bound = inspect.signature(type(model).generate).bind(model, *args, **kwargs)
    except TypeError:
        return dict(kwargs)  # `generate` itself says what is wrong with them
    named = dict(bound.arguments)
    for name, parameter in bound.signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            named |= named.pop(name, {})
    return named


def _assisted(model: Any, kwargs: dict[str, Any]) -> bool:
    """Whether the call uses assisted decoding: tokens are drafted and verified several at a time."""
    return kwargs.get("assistant_model") is not None or bool(_setting(model, kwargs, "prompt_lookup_num_tokens"))


def check_generate(model: Any, method: Method, kwargs: dict[str, Any], max_decode_slots: int | None = None) -> None:
    """Raises `UnsupportedModeError` for modes that would bypass the method or break its state.

    kwargs: every argument of the call, see `call_arguments`. max_decode_slots: the cache's option.
    """
    for name in ("assistant_early_exit", "use_mtp"):
        if _setting(model, kwargs, name):
            raise UnsupportedModeError(f"{method.name}: drafting with the model's own layers ({name}) is not supported")
    if _setting(model, kwargs, "use_cache") is False:
        raise UnsupportedModeError(f"{method.name}: use_cache=False leaves no cache to compress; remove it")
    implementation = _setting(model, kwargs, "cache_implementation")
    if implementation not in (None, "dynamic", "dynamic_full", "hybrid"):
        raise UnsupportedModeError(
            f"{method.name} brings its own cache and cannot use cache_implementation={implementation!r}; remove it "
            "(for compiled steps there is foveakv.compress(..., preallocate=...))"
        )
    if _setting(model, kwargs, "prefill_chunk_size") and (lost := compat.lost_in_chunks(kwargs)):
        raise UnsupportedModeError(
            f"transformers {compat.VERSION} loses {', '.join(lost)} when it reads a prompt in chunks; remove "
            "prefill_chunk_size, or install transformers 5.24 or newer"
        )
    if _setting(model, kwargs, "penalty_alpha"):
        raise UnsupportedModeError(f"{method.name} does not support contrastive search; remove penalty_alpha")
    guidance = _setting(model, kwargs, "guidance_scale")
    if guidance not in (None, 1) and compat.misplaces_guidance(model):
        raise UnsupportedModeError(
            f"guidance_scale: transformers {compat.VERSION} gives the unconditional branch of a {type(model).__name__} "
            "position ids of the wrong length, with a plain cache too; remove guidance_scale"
        )
    if kwargs.get("custom_generate") is not None:
        raise UnsupportedModeError(f"{method.name} does not support custom_generate; it may bypass the cache")
    if _setting(model, kwargs, "output_attentions"):
        raise UnsupportedModeError(
            f"{method.name} forms no attention weights over stored slots; remove output_attentions"
        )
    if not _assisted(model, kwargs):
        return
    if max_decode_slots is not None:
        raise UnsupportedModeError(
            f"{method.name}: max_decode_slots evicts while decoding, so rejected draft tokens cannot be cropped; "
            "remove max_decode_slots, or generate without an assistant"
        )
    if method.evicts_while_decoding:
        raise UnsupportedModeError(
            f"{method.name} evicts while decoding, so rejected draft tokens cannot be cropped; use a method that "
            "evicts at prefill only (snapkv, adakv, hybridkv), or generate without an assistant"
        )


def check_preallocated(
    model: Any, method: Method, kwargs: dict[str, Any], room: int, stored: int = 0, seen: int = 0
) -> None:
    """Raises `UnsupportedModeError` for calls that cannot run with preallocated slots (`preallocate=room`).

    stored, seen: tokens after the prompt and tokens in total that a cache from an earlier turn holds; 0 without one.
    """
    if _assisted(model, kwargs):
        raise UnsupportedModeError(
            f"{method.name}: with preallocate= a step takes one token; remove preallocate, or generate without an "
            "assistant"
        )
    wanted = _setting(model, kwargs, "max_new_tokens")
    context = _context(kwargs)
    if wanted is None and kwargs.get("max_length") is not None and context is not None:
        wanted = kwargs["max_length"] - context
    if wanted is None:
        return
    if seen:  # a later turn brings tokens too
        stored += max(0, (context or 0) - seen)
    needed = stored + wanted - 1  # the last token is not fed back
    if needed > room:
        turn = f" after the {stored} tokens of earlier turns and this one" if stored else ""
        raise UnsupportedModeError(
            f"{method.name}: max_new_tokens={wanted}{turn} does not fit preallocate={room}; use "
            f"preallocate={needed} or more"
        )


def prefill_total(model: Any, kwargs: dict[str, Any], cache: Any = None) -> int | None:
    """Length of the context that a call begins with, where its prompt may be a part of it, or a part of a pass.

    That is a later turn, a prompt in chunks, and one together with drafted tokens. None: the prompt is read whole and
    alone. cache: the cache that was passed in, if any.
    """
    seen = getattr(cache, "seen", 0)
    if not (seen or _setting(model, kwargs, "prefill_chunk_size") or _assisted(model, kwargs)):
        return None
    total = _context(kwargs)
    return total if total is None or total > seen else None


def _context(kwargs: dict[str, Any]) -> int | None:
    """The number of tokens of the context that a call begins with; None where its inputs do not tell."""
    named = (kwargs.get(name) for name in ("inputs", "input_ids", "inputs_embeds"))
    inputs = next((value for value in named if value is not None), None)
    if inputs is None:
        return None
    total = int(inputs.shape[1])
    mask = kwargs.get("attention_mask")
    # Only the new tokens may be passed together with the mask of the whole context.
    return max(total, int(mask.shape[1])) if mask is not None and mask.ndim == 2 else total

"""The wrapper around `model.forward`: gives the pass its cache, tells the cache what it reads, and cleans up after it.

However a pass ends, by a `BaseException` too, the call's references are reset, hooks that shorten the residual stream
are removed, and the cache of a pass that did not complete is dropped from its session.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from torch import Tensor

from foveakv.core.prompt import PromptMap
from foveakv.engines.transformers import compat, drafts, second_pass, token_pruning
from foveakv.engines.transformers.attachment import Attachment, Original
from foveakv.engines.transformers.blocks import Reads
from foveakv.engines.transformers.cache import CompressedCache
from foveakv.engines.transformers.calls import Call, SessionState, new_cache
from foveakv.engines.transformers.contents import digests_of
from foveakv.engines.transformers.joined import JoinedCache
from foveakv.engines.transformers.joined_forward import run_joined
from foveakv.engines.transformers.joined_positions import noted_places
from foveakv.engines.transformers.masks import check_prepared
from foveakv.engines.transformers.preallocated import padding_mask
from foveakv.engines.transformers.second_pass import FirstPass
from foveakv.errors import CacheInUseError, UnsupportedModeError
from foveakv.methods import Method
from foveakv.methods.full import Full


def wrap_forward(original: Original, model: Any) -> Any:
    """`model.forward` while it is attached."""
    signature = inspect.signature(model.forward)
    names = list(signature.parameters)

    def forward(*args: Any, **kwargs: Any) -> Any:
        if not original.active:
            return original(*args, **kwargs)
        named = {**dict(zip(names, args, strict=False)), **kwargs}
        return _run(original, named)

    functools.update_wrapper(forward, type(model).forward)
    forward.__signature__ = signature  # type: ignore[attr-defined]
    return forward


def _run(original: Original, kwargs: dict[str, Any]) -> Any:
    """One forward pass with named arguments."""
    attached = original.attachment
    cache = _take_cache(kwargs)
    if isinstance(cache, JoinedCache):
        return run_joined(original, cache, kwargs)
    call = attached.call
    if call is not None and call.running is not None and not call.generating:
        call = None  # a pass inside of a pass
    if isinstance(cache, CompressedCache):
        session = attached.session(cache) or attached.session()
    else:
        session = attached.session() if call is None else call.session
        if session is None:
            if cache is not None:
                kwargs[attached.cache_name] = cache
            with attached.entered(None):
                return original(**kwargs)
    if call is not None:
        return _compressed(original, call, session, cache, kwargs)
    call = Call(session)
    with attached.entered(call):
        return _compressed(original, call, session, cache, kwargs)


def _compressed(
    original: Original, call: Call, session: SessionState | None, cache: Any, kwargs: dict[str, Any]
) -> Any:
    """A pass with a compressed cache: `cache`, or a new one of `session` in its place."""
    model, attached = original.model, original.attachment
    if session is not None and not isinstance(cache, CompressedCache):
        check_replaceable(session.method, cache, kwargs, made_by_generate=call.generating)
        cache = session_cache(model, call, session, kwargs)
    drafted = _drafted(attached, call, cache, kwargs)
    if drafted:
        parts = drafts.split(kwargs, drafted)
        first, second = (_compressed(original, call, session, cache, part) for part in parts)
        return drafts.joined(first, second, kwargs.get("logits_to_keep", 0))
    outer, handles = call.running, []
    try:
        _check(model, cache, kwargs)
        kwargs[attached.cache_name] = cache
        _begin(attached, call, cache, kwargs)
        call.running = cache
        if call.compiled is not None:
            kwargs["attention_mask"] = None  # it grows with every token; what it says is in the slots
            output = call.compiled(model, **kwargs)
        else:
            if cache.method.prunes_after is not None and not cache.prefilled:
                layers = compat.decoder_of(model).layers
                handles = token_pruning.install(layers, functools.partial(_running, attached, call, cache))
            first = FirstPass() if cache.method.observes.second_pass and not cache.prefilled else None
            if first is not None:
                decoder = compat.decoder_of(model)
                handles.append(second_pass.install(decoder, lambda: first if _running(attached, call, cache) else None))
            output = original(**kwargs)
            if first is not None:
                second_pass.run(decoder, first, cache.seen)
        cache.end_forward(attached.model_state())
        if cache.contents is not None:
            digests, call.digests = call.digests, {}
            cache.contents.note(_ids(kwargs), digests or digests_of(kwargs))
        return output
    except BaseException:
        if cache.forward_tokens is not None or cache.seen == 0:  # incomplete, or nothing has been read yet
            call.discard(cache)
        raise
    finally:
        call.running = outer
        for handle in handles:
            handle.remove()


def _running(attached: Attachment, call: Call, cache: CompressedCache) -> CompressedCache | None:
    """The cache of a pass whose hooks ask for it: other threads' passes meet the same hooks, and get none."""
    if torch.compiler.is_compiling():
        return None
    return cache if attached.call is call and call.running is cache else None


def check_replaceable(method: Method, cache: Any, kwargs: dict[str, Any], made_by_generate: bool = False) -> None:
    """Raises `UnsupportedModeError` unless a call's cache may be replaced by a compressed one.

    It may where there is none, or an empty one that `generate` has just made.
    """
    if kwargs.get("use_cache") is False:
        raise UnsupportedModeError(
            "use_cache=False leaves no cache to compress; remove it, or leave the compress() block"
        )
    if cache is not None and not (
        made_by_generate and type(cache) is compat.DynamicCache and cache.get_seq_length() == 0
    ):
        raise UnsupportedModeError(
            f"{method.name} cannot compress a {type(cache).__name__} that is passed in; remove past_key_values, or "
            "pass a cache from this session"
        )


def session_cache(
    model: Any, call: Call, session: SessionState, kwargs: dict[str, Any] | None = None
) -> CompressedCache:
    """A new cache of a session for a call; kwargs: the arguments of the pass that needs it.

    A prompt that a generate call reads in addition to its own (the unconditional branch of classifier-free guidance)
    usually has no image. A method that only drops visual tokens has nothing to drop there, so the branch is stored
    whole; the session's report says so.
    """
    method = session.method
    if call.generating and call.caches and method.visual_only and kwargs is not None:
        prompt = prompt_map(model, kwargs)
        if not bool(prompt.visual.any()):
            method = Full()
    cache = new_cache(model, method, session.options)
    call.add(cache)
    return cache


def _take_cache(kwargs: dict[str, Any]) -> Any:
    found = [kwargs.pop(name) for name in compat.CACHE_NAMES if name in kwargs]
    return next((cache for cache in found if cache is not None), None)


def _check(model: Any, cache: CompressedCache, kwargs: dict[str, Any]) -> None:
    """Raises where the pass cannot run with this cache, before anything is changed."""
    if cache.owner is None or cache.owner() is not model:
        raise CacheInUseError(
            "this compressed cache was made for another model; make one with foveakv.cache_for(model, ...)"
        )
    if kwargs.get("output_attentions"):
        raise UnsupportedModeError("output_attentions=True: attention over stored slots does not form weights")
    if kwargs.get("output_hidden_states") and cache.method.prunes_after is not None:
        raise UnsupportedModeError(
            f"{cache.method.name} with drop_hidden_states: layers see different numbers of tokens, so "
            "output_hidden_states=True is not supported"
        )


def _begin(attached: Attachment, call: Call, cache: CompressedCache, kwargs: dict[str, Any]) -> None:
    """Tells the cache what the pass reads."""
    model: Any = attached.model()
    if cache.preallocated is not None and kwargs.get("attention_mask") is not None:
        kwargs["attention_mask"] = padding_mask(kwargs["attention_mask"])
    if call.compiled is not None and kwargs.get("position_ids") is None:
        raise UnsupportedModeError("a compiled step needs position_ids; `generate` passes them, pass yours too")
    if not call.generating:
        attached.set_model_state(cache.model_state)
    placed, ids = noted_places(cache, kwargs), _ids(kwargs)
    new = ids.shape[1]
    total = _total(attached, call, cache, new)
    _check_mask(cache, kwargs.get("attention_mask"), new, None if cache.compresses_chunks else total)
    block = _block(attached, call, cache, new, total)
    prompt = None if cache.prefilled and block is None else prompt_map(model, kwargs)
    known = kwargs.get("input_ids") is not None or kwargs.get("mm_token_type_ids") is not None
    cache.begin_forward(
        new, prompt, total, model.dtype.itemsize, batch=len(ids), mask=kwargs.get("attention_mask"), kinds_known=known,
        block=block,
    )  # fmt: skip
    cache.placed = placed  # only now: a pass that is refused changes nothing
    if block is not None and not call.generating and block.total is not None and (session := attached.session()):
        session.prompt_from = block.began


def _block(attached: Attachment, call: Call, cache: CompressedCache, new: int, total: int | None) -> Reads | None:
    """What block a pass over `new` tokens reads; None: decoded tokens, drafts, or a prompt that is no further block."""
    session = attached.session()
    if call.feeding:
        return Reads("feed", None)
    if call.generating:
        began = call.began
        # A call that adds one token goes on decoding.
        first = total is None and 0 < began == cache.seen and new > 1
        inside = first or (total is not None and cache.seen < total and total - began > 1)
    elif total is not None and session is not None and cache.seen < total:
        began, inside = cache.seen if session.prompt_from is None else session.prompt_from, True
    else:
        began, inside, total = cache.seen, cache.prefilled and new > 1, None
    if not inside or not (cache.prefilled or cache.compresses_chunks):
        return None
    return Reads("turn" if began else "chunk", total, began)


def _check_mask(cache: CompressedCache, mask: Any, new: int, total: int | None) -> None:
    """Raises `UnsupportedModeError` for a 4-D mask of the caller that attention over stored slots cannot follow."""
    if not check_prepared(mask, cache.seen, new) or cache.prefilled:
        return
    method = cache.method
    if method.prunes_after is not None:
        raise UnsupportedModeError(
            f"{method.name} with drop_hidden_states needs a 2-D attention mask (1 = token, 0 = padding) or none"
        )
    whole = cache.seen == 0 and (total is None or new >= total)
    if not whole and any(method.needs_queries(layer.compressed_idx) for layer in cache.compressed):
        raise UnsupportedModeError(
            f"{method.name} scores query rows of the whole prompt, and a 4-D attention mask has the rows of one chunk "
            "only; pass the prompt at once, or a 2-D mask (1 = token, 0 = padding)"
        )


def _drafted(attached: Attachment, call: Call, cache: CompressedCache, kwargs: dict[str, Any]) -> int:
    """The number of tokens after the prompt, or after a later turn, in the pass that completes it."""
    new = _ids(kwargs).shape[1]
    total = _total(attached, call, cache, new)
    if total is not None and 0 < call.began == cache.seen and new >= total:
        raise UnsupportedModeError(
            f"transformers {compat.VERSION} reads the whole context again when assisted decoding continues a cache; "
            "generate without an assistant, or without the cache"
        )
    if cache.prefilled:
        block = _block(attached, call, cache, new, total)
        total = None if block is None else block.total
    return 0 if total is None else max(0, cache.seen + new - total)


def _total(attached: Attachment, call: Call, cache: CompressedCache, new: int) -> int | None:
    """The number of tokens at which the prompt of a pass is complete; None: with the pass itself."""
    if call.generating:
        return call.prompt_total if call.caches[:1] == [cache] else None  # a second branch reads its prompt at once
    session = attached.session()
    return None if session is None else session.total_for(cache, new)


def _ids(kwargs: dict[str, Any]) -> Tensor:
    """Token ids [B, q]; -1 for embeddings: no placeholder, so text unless mm_token_type_ids says otherwise."""
    ids, embeds = kwargs.get("input_ids"), kwargs.get("inputs_embeds")
    if ids is not None:
        return ids
    if embeds is None:
        raise UnsupportedModeError("a compressed model needs input_ids or inputs_embeds")
    return torch.full(embeds.shape[:2], -1, device=embeds.device)


def prompt_map(model: Any, kwargs: dict[str, Any]) -> PromptMap:
    """What each token of a prompt, or of a chunk of it, is."""
    ids = _ids(kwargs)
    new = ids.shape[1]
    return PromptMap.from_inputs(
        model.config,
        ids,
        _last(kwargs.get("attention_mask"), new),
        _last(kwargs.get("mm_token_type_ids"), new),
        _last(kwargs.get("token_type_ids"), new),
    )


def _last(mask: Any, columns: int) -> Tensor | None:
    """The newest columns of a 2-D mask or type map that covers the whole context; 4-D masks say nothing of padding."""
    if not isinstance(mask, Tensor) or mask.ndim != 2:
        return None
    return mask[:, -columns:]

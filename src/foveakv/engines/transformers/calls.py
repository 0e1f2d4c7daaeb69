"""State of a session and of a model call."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from foveakv.engines.transformers import compat
from foveakv.engines.transformers.cache import CompressedCache
from foveakv.engines.transformers.options import CacheOptions
from foveakv.errors import UnsupportedModelError
from foveakv.methods import Method


@dataclass(eq=False)
class SessionState:
    """What calls need to know of an open `compress` block.

    Attributes:
        given: the method object of the caller.
        method, options: every cache that is made in the session gets these; method: `given` for this model, see
            `Method.for_model`.
        prompt_total: set inside `chunked_prefill`: prompts are complete at this number of tokens.
        prompt_from: with it, the tokens that were there when its first chunk was read.
        reading: with it, the caches that are being read in chunks.
        caches: those of the latest call, the prompt's first. A call with a second branch (the unconditional one of
            classifier-free guidance) has one more for each.
        calls: calls in progress.
    """

    given: Method
    options: CacheOptions
    method: Method = field(init=False)
    prompt_total: int | None = None
    prompt_from: int | None = None
    reading: weakref.WeakSet[CompressedCache] = field(default_factory=weakref.WeakSet)
    caches: list[CompressedCache] = field(default_factory=list)
    calls: weakref.WeakSet[Call] = field(default_factory=weakref.WeakSet)

    def __post_init__(self) -> None:
        self.method = self.given

    def total_for(self, cache: CompressedCache, new: int) -> int | None:
        """`prompt_total` if a pass of `new` tokens reads a chunk; None: it does not.

        Caches with a complete prompt may decode between the chunks of another one. Of these only the first that adds
        several tokens, or the session's own, is read in chunks: a later turn of it.
        """
        total = self.prompt_total
        if total is None or cache in self.reading:
            return total
        turn = not self.reading and cache.seen < total and (new > 1 or any(cache is own for own in self.caches))
        if cache.prefilled and not turn:
            return None
        self.reading.add(cache)
        return total


@dataclass(eq=False)
class Call:
    """One call of `generate`, or one forward pass outside of `generate`.

    The thread that runs it finds it through a weak reference, so that it never outlives the frame of the wrapper that
    made it, however that frame is left.

    Attributes:
        session: the session that makes the caches of the call; None when the call brought a cache of `cache_for`.
        generating: whether this is a call of `generate`, which prepares position ids before each forward pass.
        prompt_total: the prompt is complete at this number of tokens; None: it is read in one forward pass.
        began: tokens of the passed cache when the call began.
        feeding: whether this is a call of `session.feed`.
        digests: of the images and other inputs of a `generate` call, which may encode them before its first pass, until
            a cache has recorded them.
        caches: the cache that was passed in, if any, and those made since.
        running: the cache of the forward pass in progress.
        compiled: the compiled forward that the next pass is to run, f(model, **arguments).
        finish: releases the model; called by the wrapper when the call ends.
    """

    session: SessionState | None
    generating: bool = False
    prompt_total: int | None = None
    began: int = 0
    feeding: bool = False
    digests: dict[str, str] = field(default_factory=dict)
    caches: list[CompressedCache] = field(default_factory=list)
    running: CompressedCache | None = None
    compiled: Callable[..., Any] | None = None
    finish: Callable[[], Any] = lambda: None
    thread: threading.Thread = field(default_factory=threading.current_thread)

    def __post_init__(self) -> None:
        if self.session is not None:
            self.session.calls.add(self)

    def add(self, cache: CompressedCache) -> None:
        """Records a cache that was made during the call; the session's results are those of this call from now on."""
        self.caches.append(cache)
        if self.session is not None:
            self.session.caches = self.caches

    def discard(self, cache: CompressedCache) -> None:
        """Drops a cache whose forward pass failed: it cannot be used again, and its memory is to be freed."""
        for caches in [self.caches] + ([self.session.caches] if self.session is not None else []):
            caches[:] = [other for other in caches if other is not cache]


def new_cache(model: compat.PreTrainedModel, method: Method, options: CacheOptions) -> CompressedCache:
    """A cache for `model` alone.

    Raises:
        UnsupportedModelError: the model has no layer that can be compressed.
    """
    cache = CompressedCache(compat.text_config_of(model), method, options)
    if not cache.compressed:
        raise UnsupportedModelError(f"{type(model).__name__} has no plain attention layer to compress")
    cache.owner = weakref.ref(model)
    return cache


def passed_cache(arguments: dict[str, Any]) -> Any:
    """The cache among the named arguments of a call, under either of its names; None without one."""
    return next((arguments[name] for name in compat.CACHE_NAMES if arguments.get(name) is not None), None)

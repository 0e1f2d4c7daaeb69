"""Sessions: `with` blocks in which a model's caches are compressed."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, NoReturn

from torch import Tensor

from foveakv.engines.transformers import compat, families, second_pass, token_pruning
from foveakv.engines.transformers.attach import attachment_of, models_using
from foveakv.engines.transformers.attachment import Attachment, lock
from foveakv.engines.transformers.cache import CompressedCache
from foveakv.engines.transformers.calls import SessionState
from foveakv.engines.transformers.feed import feed
from foveakv.engines.transformers.fingerprint import facts_of
from foveakv.engines.transformers.options import ENGINE, CacheOptions
from foveakv.engines.transformers.report import Report
from foveakv.errors import CacheInUseError, MethodError, UnsupportedModeError
from foveakv.methods import Method


class Session:
    """A `with` block in which a model's caches are compressed; made by `foveakv.compress`.

    A session belongs to the thread that enters the block: calls of the model in other threads are plain, unless they
    go through `session.generate` or run inside `session.in_this_thread()`. Sessions may be nested; the innermost one of
    a thread is used. Results (`report`, `kept`, `cache`) are those of the latest prompt and outlive the block.
    """

    def __init__(self, model: compat.PreTrainedModel, method: Method, options: CacheOptions) -> None:
        check_method(method)
        options.check(method)
        self.model = model
        self.method = method
        self.options = options
        self._state = SessionState(method, options)
        self._attached: Attachment | None = None
        self._release: Any = None
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Session:
        with lock:
            if self._attached is not None:
                raise CacheInUseError("this session is already open; call foveakv.compress() again for a second one")
            if any(model is not self.model for model in models_using(self.method)):
                raise CacheInUseError("this method object is in use on another model; make a second one")
            attached = attachment_of(self.model)
            self._state.method = fitted(self.model, self.method)
            self._release = attached.hold(self._state)
            self._thread = threading.current_thread()
            attached.sessions.append(self._state)
            attached.bind(self._state)
            self._attached = attached
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with lock:
            attached, self._attached = self._attached, None
            if attached is None or self._thread is None:
                return
            attached.sessions.remove(self._state)
            attached.unbind(self._state, self._thread)
            attached.end_calls(self._state)
            self._release()

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """`model.generate(...)` with this session's method, in whichever thread it is called.

        For worker threads, as streaming needs them:

            thread = Thread(target=session.generate, kwargs={**inputs, "streamer": streamer})

        Join the thread before the block ends, and use one at a time: `report` describes the latest call.

        Raises:
            CacheInUseError: the session is not open.
        """
        with self.in_this_thread():
            return self.model.generate(*args, **kwargs)

    @contextmanager
    def in_this_thread(self) -> Iterator[None]:
        """A block in which calls of the model in the current thread belong to this session.

        For worker threads with hand-written loops; `session.generate` does it for one call. The model stays attached
        until all such blocks have ended, also when the session's own block ends first.

        Raises:
            CacheInUseError: the session is not open.
        """
        with lock:
            attached = self._attached
            if attached is None:
                raise CacheInUseError(
                    "this session is not open: use it inside its `with` block, and join threads that use it before the "
                    "block ends"
                )
            release = attached.hold(self._state)
            attached.bind(self._state)
        thread = threading.current_thread()
        try:
            yield
        finally:
            attached.unbind(self._state, thread)
            release()

    @contextmanager
    def chunked_prefill(self, tokens: int) -> Iterator[None]:
        """For hand-written loops that read a prompt in chunks: it is compressed once `tokens` tokens have been read.

        With the option `chunks="compress"`, every chunk is compressed when it has been read. tokens: the length of the
        context once the prompt is complete; shares in a budget are of it. Other caches may decode meanwhile.
        `generate(prefill_chunk_size=...)` needs no such block.

        Raises:
            CacheInUseError: the session is not open.
        """
        if self._attached is None:
            raise CacheInUseError("chunked_prefill() works inside the session's `with` block only")
        state = self._state
        outer = state.prompt_total, state.prompt_from, state.reading
        try:
            state.prompt_total, state.prompt_from, state.reading = tokens, None, weakref.WeakSet()
            yield
        finally:
            state.prompt_total, state.prompt_from, state.reading = outer

    def feed(self, **inputs: Any) -> Any:
        """Read a block of the context without generating: the first one, or one after what `cache` has read.

        The block is compressed as the method says (`Method.further`). Text that is fed belongs to no turn: `keep_text`
        protects it once a turn (`generate`) follows.

        Args:
            inputs: as for `model(...)`: token ids of the block alone [B, q], pixels of its images, and with padding the
                2-D mask of the block or of the whole context. Models with M-RoPE need `position_ids` for later blocks
                with images.

        Returns:
            The model's output, with the logits of the last token.

        Raises:
            CacheInUseError: the session is not open, or its prompt is not complete.
            InputError: the mask does not fit.
            UnsupportedModeError: positions are needed.
        """
        with self.in_this_thread():
            return feed(attachment_of(self.model), self._state, inputs)

    @property
    def caches(self) -> tuple[CompressedCache, ...]:
        """All caches of the latest call, the prompt's first.

        There is more than one where `generate` runs a second branch: with `guidance_scale` the unconditional one.
        """
        return tuple(self._state.caches)

    @property
    def cache(self) -> CompressedCache:
        """The cache of the latest prompt.

        Raises:
            CacheInUseError: nothing has been generated yet, or the latest call did not complete.
        """
        if not self._state.caches:
            raise CacheInUseError(
                "nothing has been generated in this session yet, or the latest call did not complete and its cache was "
                "dropped"
            )
        return self._state.caches[0]

    @property
    def report(self) -> Report:
        """What happened to the latest prompt: slots, bytes, evictions, retrievals, times.

        Raises:
            CacheInUseError: as `cache`.
        """
        return Report.of(self.cache, branches=self.caches[1:])

    @property
    def trace(self) -> list[dict[int, Tensor]]:
        """For each forward pass, layer index -> LongTensor [B, H, M], the positions attended to (-1: none).

        A dense pass (prefill) has no entries. Needs `compress(..., trace=True)`.

        Raises:
            CacheInUseError: as `cache`, or no trace was recorded.
        """
        if self.cache.trace is None:
            raise CacheInUseError("no trace was recorded; use foveakv.compress(model, method, trace=True)")
        return self.cache.trace

    def kept(self, layer: int) -> Tensor:
        """Positions that model layer `layer` attends to, those retrieved in the last step included.

        LongTensor [B, H, M], ascending, padded with -1 at the end.

        Raises:
            CacheInUseError: as `cache`.
            MethodError: the layer does not exist or is not compressed.
        """
        return self.cache.kept(layer)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise UnsupportedModeError(
            "a session cannot be copied or pickled; copy the model (the copy is a plain model), or session.cache with "
            "copy.deepcopy"
        )


def resumed(model: compat.PreTrainedModel, cache: CompressedCache) -> Session:
    """A session that goes on with a cache of `model`, as if it had made it."""
    made = Session(model, cache.method, cache.options)
    made._state.caches.append(cache)
    return made


def check_method(method: Any) -> None:
    """Raises `MethodError` unless `method` is a method object."""
    if not isinstance(method, Method):
        raise MethodError(f"expected a method such as foveakv.HAE(), got {type(method).__name__}: {method!r}")
    ENGINE.check(method)


def fitted(model: compat.PreTrainedModel, method: Method) -> Method:
    """Return the method for this model, see `Method.for_model`.

    Raises:
        MethodError: its settings do not suit the model.
        UnsupportedModelError: the model cannot do what the method needs.
    """
    families.check_supported(model)  # its reason comes before what the facts lack
    method = method.for_model(facts_of(model))
    check_method(method)
    check_fits(model, method)
    return method


def check_fits(model: compat.PreTrainedModel, method: Method) -> None:
    """Raise `UnsupportedModelError` where the model cannot do what the method needs."""
    if method.prunes_after is not None:
        token_pruning.check_supported(model)
        layers = len(compat.default_layers(compat.text_config_of(model)))
        if not 0 <= method.prunes_after < layers - 1:
            raise MethodError(
                f"{method.name}: prunes_after={method.prunes_after} must name a layer from 0 to {layers - 2}: the last "
                "layer has no later ones"
            )
    if method.observes.second_pass:
        second_pass.check_supported(model)

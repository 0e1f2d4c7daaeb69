"""Attach FoveaKV to a model instance and detach it again.

While attached, the following is changed, on the instance alone, and restored when the last user is gone:

- the attention implementation in the text decoder's config: `foveakv_<base>` instead of `<base>` (see `attention.py`);
- instance attributes `forward`, `generate` and `get_compiled_call` that wrap the class's (or those that another library
  had set on the instance): see `forward.py`, `generate.py` and `compiled.py`;
- an instance attribute `__reduce_ex__`, through which `copy.deepcopy`, `pickle` and `torch.save` leave all of this out,
  so that a copy of an attached model is a plain model.

The wrappers are plain Python around the original call, with `try/finally`, and not torch hooks: torch skips hooks, also
those registered with `always_call=True`, when a forward pass is left by a `BaseException` that is not an `Exception`
(`KeyboardInterrupt`, `SystemExit`, `GeneratorExit`, `asyncio.CancelledError`).

Users of an attachment are open sessions, caches from `cache_for`, and calls in progress. Each is held through a weak
reference, so that whatever is dropped without being closed is released when it is collected.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from foveakv.engines.transformers import attention, compat, families, probe
from foveakv.engines.transformers.cache import CompressedCache
from foveakv.engines.transformers.calls import Call, SessionState
from foveakv.errors import CacheInUseError

# One lock for all models: attaching is rare. Finalizers may run inside of a locked section, so it is re-entrant.
lock = threading.RLock()


@dataclass(frozen=True)
class Original:
    """A method of the model as it was before attaching; calling it calls that.

    attachment: what the wrapper belongs to. name: the method's. own: the instance attribute that was set before; None
    where the class's method was used. epoch: counts how often the model had been attached.
    """

    attachment: Attachment
    name: str
    own: Any
    epoch: int

    @property
    def active(self) -> bool:
        """False once the model was detached. Code that wrapped this wrapper may still call it then."""
        return self.attachment.attached and self.attachment.epoch == self.epoch

    @property
    def model(self) -> Any:
        """The model; raises `CacheInUseError` where it has been garbage-collected."""
        model = self.attachment.model()
        if model is None:
            raise CacheInUseError("the model that this method belonged to has been garbage-collected")
        return model

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.own is not None:
            return self.own(*args, **kwargs)
        model = self.model
        return getattr(type(model), self.name)(model, *args, **kwargs)


# Factory: (original, model) -> replacement attribute.
Wrap = Callable[[Original, Any], Any]


class Attachment:
    """What is changed on one model, shared by all sessions and caches on it.

    wraps: for each wrapped method's name what makes the wrapper.
    """

    def __init__(self, model: compat.PreTrainedModel, wraps: Mapping[str, Wrap]) -> None:
        self.model = weakref.ref(model)
        self.sessions: list[SessionState] = []
        self.attached = False
        self.epoch = 0
        self.cache_name = ""  # the argument of `forward` that takes a cache
        self._wraps = wraps
        self._checked = False
        self._users: set[int] = set()
        self._last_user = 0
        self._bound: weakref.WeakKeyDictionary[threading.Thread, list[SessionState]] = weakref.WeakKeyDictionary()
        self._local = threading.local()
        self._base = ""  # the attention implementation to restore
        self._wrappers: dict[str, tuple[Original, Any]] = {}
        self._stateful: list[weakref.ref[Any]] = []
        self._original_state: list[Any] = []

    # ---- users

    def hold(self, user: Any) -> weakref.finalize[Any, Any]:
        """Attaches the model until the returned object is called or `user` is garbage-collected.

        Raises:
            UnsupportedModelError: the model's attention cannot be compressed correctly.
        """
        with lock:
            if not self.attached:
                self._attach()
            self._last_user += 1
            self._users.add(self._last_user)
            release = weakref.finalize(user, self._release, self._last_user)
            release.atexit = False
        return release

    def _release(self, user: int) -> None:
        with lock:
            self._users.discard(user)
            if not self._users and self.attached:
                self._detach()

    # ---- sessions and threads

    def bind(self, session: SessionState) -> None:
        """From now on, calls of the calling thread belong to `session`."""
        with lock:
            self._bound.setdefault(threading.current_thread(), []).append(session)

    def unbind(self, session: SessionState, thread: threading.Thread) -> None:
        """Undoes the latest `bind` of `session` by `thread`."""
        with lock:
            bound = self._bound.get(thread, [])
            for place in range(len(bound) - 1, -1, -1):
                if bound[place] is session:
                    del bound[place]
                    return

    def session(self, cache: CompressedCache | None = None) -> SessionState | None:
        """The calling thread's innermost session, or that which made `cache`; None without one."""
        bound = self._bound.get(threading.current_thread(), [])
        if cache is None:
            return bound[-1] if bound else None
        return next((session for session in bound[::-1] if any(cache is made for made in session.caches)), None)

    # ---- calls

    @property
    def call(self) -> Call | None:
        """The call that the calling thread is in."""
        reference: weakref.ref[Call] | None = getattr(self._local, "call", None)
        return None if reference is None else reference()

    @contextmanager
    def entered(self, call: Call | None) -> Iterator[None]:
        """Makes `call` the calling thread's, and keeps the model attached; None: calls inside are plain."""
        outer, lazy = getattr(self._local, "call", None), attention.thread.lazy
        try:
            if call is not None:
                call.finish = self.hold(call)
            self._local.call = None if call is None else weakref.ref(call)
            attention.thread.lazy = call is not None
            yield
        finally:
            self._local.call = outer
            attention.thread.lazy = lazy
            if call is not None:
                call.finish()

    def end_calls(self, session: SessionState) -> None:
        """Ends the calling thread's calls of a session that it leaves.

        None of them can be in progress any more. One that still counts as such was interrupted between two
        instructions of its wrapper, and the interrupt's traceback keeps it alive.
        """
        for call in list(session.calls):
            if call.thread is threading.current_thread():
                call.running = None
                call.finish()

    # ---- M-RoPE state

    @property
    def has_offsets(self) -> bool:
        """Whether the model keeps an offset between the index of a token and its position (M-RoPE)."""
        return bool(self._stateful)

    def model_state(self) -> list[Any]:
        """What the model keeps on itself between calls: one M-RoPE offset for each module that has one."""
        return [getattr(module(), "rope_deltas", None) for module in self._stateful]

    def set_model_state(self, values: list[Any] | None) -> None:
        """Puts offsets on the model; None or an empty list: none, as before a first call."""
        for reference, value in zip(self._stateful, values or [None] * len(self._stateful), strict=True):
            module = reference()
            if module is not None:
                module.rope_deltas = value

    # ---- the changes themselves

    def _attach(self) -> None:
        model = self.model()
        if model is None:
            raise CacheInUseError("the model has been garbage-collected")
        if not self._checked:
            families.check_supported(model)
            probe.check(model)
            self._checked = True
        self.cache_name = compat.cache_argument(model)
        self._base = str(compat.text_config_of(model)._attn_implementation)
        # M-RoPE models keep the offset between token index and position on a module, not in the cache.
        self._stateful = [weakref.ref(module) for module in model.modules() if "rope_deltas" in vars(module)]
        self._original_state = self.model_state()
        self.epoch += 1
        self._wrappers = {}
        for name, wrap in self._wraps.items():
            original = Original(self, name, vars(model).get(name), self.epoch)
            self._wrappers[name] = original, wrap(original, model)
        self.attached = True
        try:
            compat.set_text_attention(model, attention.implementation(self._base))
            for name, (_, wrapper) in self._wrappers.items():
                setattr(model, name, wrapper)
        except BaseException:
            self._detach()
            raise

    def _detach(self) -> None:
        model = self.model()
        if model is not None:
            for name, (original, wrapper) in self._wrappers.items():
                # Where something else was set over the wrapper since, it stays: an inactive wrapper only passes on.
                if vars(model).get(name) is wrapper:
                    delattr(model, name)
                    if original.own is not None:
                        setattr(model, name, original.own)
            compat.set_text_attention(model, self._base)
            self.set_model_state(self._original_state)
        self.attached = False
        self._wrappers, self._stateful, self._original_state = {}, [], []

    def own(self, name: str) -> Any:
        """The instance attribute that a wrapper has replaced; None where the class's method was used."""
        return self._wrappers[name][0].own

    def plain_attributes(self, attributes: Mapping[str, Any]) -> dict[str, Any]:
        """Instance attributes of the model without the wrappers."""
        plain = dict(attributes)
        for name, (original, wrapper) in self._wrappers.items():
            if plain.get(name) is wrapper:
                del plain[name]
                if original.own is not None:
                    plain[name] = original.own
        return plain

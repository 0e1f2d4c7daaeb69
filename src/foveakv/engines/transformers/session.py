"""`compress(model, method)` and `cache_for(model, method)`: attach a method to a model and detach it again.

While attached, only the model instance is modified, and detaching restores it: the attention implementation of its text
decoder, two forward hooks, and an instance attribute `generate` that wraps the class's (it checks the generation mode,
and separates the M-RoPE state that some models store on themselves). With `preallocate=` also `forward` and
`get_compiled_call`: the hooks, which check and count on the host, run outside the compiled code.
"""

from __future__ import annotations

import functools
import inspect
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from foveakv.core.prompt import PromptMap
from foveakv.engines.transformers import attention, compat, families
from foveakv.engines.transformers import token_pruning as hidden
from foveakv.engines.transformers.cache import CompressedCache
from foveakv.engines.transformers.generation_modes import (
    call_arguments,
    check_generate,
    check_preallocated,
    prefill_total,
)
from foveakv.engines.transformers.masks import LazyMask
from foveakv.engines.transformers.options import CacheOptions, resolve
from foveakv.engines.transformers.preallocated import compile_settings, padding_mask
from foveakv.errors import CacheInUseError, MethodError, UnsupportedModeError, UnsupportedModelError
from foveakv.methods import Method

if TYPE_CHECKING:
    from foveakv.engines.transformers.report import Report

_lock = threading.RLock()  # finalizers may come in the middle of an attachment's own work, so it is re-entrant
_attachments: weakref.WeakKeyDictionary[nn.Module, Attachment] = weakref.WeakKeyDictionary()


class Attachment:
    """One model's hooks, shared by all sessions and caches on it; removed with the last of them."""

    def __init__(self, model: compat.PreTrainedModel) -> None:
        families.check_supported(model)
        self.model = weakref.ref(model)
        self.users = 0
        self.running = 0  # forward passes under way; attention must not change below them
        self.sessions: list[Session] = []
        self.cache_name = compat.cache_argument(model)
        self.decoder = weakref.ref(compat.decoder_of(model))
        self._local = threading.local()
        self._base = ""  # the attention implementation to go back to
        self._own_generate: Any = None  # an instance attribute that was there before ours
        self._own_steps: dict[str, Any] | None = None  # the same for `forward` and `get_compiled_call`; None: not ours
        self._compiled: list[tuple[Any, Any]] = []  # compile settings and what they gave
        self._handles: list[Any] = []
        self._hidden_handles: list[Any] = []
        # M-RoPE models keep the offset between token index and position on a module, not in the cache.
        self._stateful = [module for module in model.modules() if "rope_deltas" in vars(module)]
        self._original_state: list[Any] = []

    def acquire(self) -> None:
        with _lock:
            if not self._handles:
                self._attach()
            self.users += 1

    def release(self) -> None:
        with _lock:
            self.users -= 1
            self._detach_if_idle()

    def _detach_if_idle(self) -> None:
        if self.users == 0 and self.running == 0 and self._handles:
            self._detach()

    def session(self) -> Session | None:
        """The innermost open session of this thread; for threads without one (streamers), the latest of all."""
        own = [session for session in self.sessions if session.thread == threading.get_ident()]
        candidates = own or self.sessions
        return candidates[-1] if candidates else None

    def use_hidden_hooks(self) -> None:
        """Installs the hooks that shorten the residual stream, for methods that ask for it."""
        model, decoder = self.model(), self.decoder()
        if model is not None and decoder is not None and not self._hidden_handles:
            hidden.check_supported(model)
            self._hidden_handles = hidden.install(decoder.layers, self._shortening)

    def _shortening(self) -> CompressedCache | None:
        """The cache whose forward pass is running in this thread; a compiled step is never a prefill."""
        return None if torch.compiler.is_compiling() else getattr(self._local, "cache", None)

    def use_compiled_steps(self) -> None:
        """Lets `get_compiled_call` (what `generate` asks for) compile the steps of caches with preallocated slots."""
        model = self.model()
        if model is None or self._own_steps is not None:
            return
        self._own_steps = {name: vars(model).get(name) for name in ("forward", "get_compiled_call")}
        reference, own, own_compiled = self.model, *self._own_steps.values()

        def forward(*args: Any, **kwargs: Any) -> Any:
            model: Any = reference()
            run = getattr(self._local, "compiled", None)
            if run is None and own is not None:
                return own(*args, **kwargs)
            return (run or type(model).forward)(model, *args, **kwargs)

        forward.__signature__ = inspect.signature(model.forward)  # type: ignore[attr-defined]

        def get_compiled_call(compile_config: Any = None) -> Any:
            def step(*args: Any, **kwargs: Any) -> Any:
                model = reference()
                if model is None:
                    raise CacheInUseError("the model is gone")
                cache = next((kwargs[name] for name in compat.CACHE_NAMES if kwargs.get(name) is not None), None)
                if not isinstance(cache, CompressedCache) or cache.preallocated is None:
                    theirs = own_compiled or functools.partial(type(model).get_compiled_call, model)
                    return theirs(compile_config)(*args, **kwargs)
                ids = kwargs.get("input_ids")
                if cache.prefilled and ids is not None and ids.shape[1] == 1:
                    self._local.compiled = self._compile(model, own, compile_config)
                try:
                    return model(*args, **kwargs)
                finally:
                    self._local.compiled = None

            return step

        model.forward = forward
        model.get_compiled_call = get_compiled_call

    def _compile(self, model: Any, own: Any, compile_config: Any) -> Any:
        """The model's forward, compiled: f(model, ...). torch keeps what it compiled for longer than this object."""
        settings = compile_settings(model, compile_config)
        for known, compiled in self._compiled:
            if known == settings:
                return compiled
        target = type(model).forward if own is None else lambda model, *args, **kwargs: own(*args, **kwargs)
        compiled = torch.compile(target, **settings.to_dict())
        self._compiled.append((settings, compiled))
        return compiled

    @contextmanager
    def prefill_of(self, total: int | None) -> Iterator[None]:
        """In this thread, prefills are complete at `total` tokens; None = every one comes whole."""
        outer = getattr(self._local, "total", None)
        self._local.total = total
        try:
            yield
        finally:
            self._local.total = outer

    def _attach(self) -> None:
        model = self.model()
        if model is None:
            return
        self._base = compat.text_config_of(model)._attn_implementation
        self._original_state = self._model_state()
        self._own_generate = vars(model).get("generate")
        compat.set_text_attention(model, attention.implementation(self._base))
        self._handles = [
            model.register_forward_pre_hook(self._before, with_kwargs=True),
            model.register_forward_hook(self._after, with_kwargs=True, always_call=True),
        ]
        model.generate = self._wrap_generate(model)

    def _detach(self) -> None:
        model = self.model()
        for handle in self._handles + self._hidden_handles:
            handle.remove()
        self._handles, self._hidden_handles = [], []
        self._local = threading.local()
        if model is None:
            return
        for name, own in {"generate": self._own_generate, **(self._own_steps or {})}.items():
            vars(model).pop(name, None)
            if own is not None:
                setattr(model, name, own)
        self._own_steps, self._compiled = None, []
        compat.set_text_attention(model, self._base)
        self._set_model_state(self._original_state)
        _attachments.pop(model, None)

    # ---- M-RoPE state

    def _model_state(self) -> list[Any]:
        return [module.rope_deltas for module in self._stateful]

    def _set_model_state(self, values: list[Any] | None) -> None:
        for module, value in zip(self._stateful, values or [None] * len(self._stateful), strict=True):
            module.rope_deltas = value

    # ---- generate

    def _wrap_generate(self, model: compat.PreTrainedModel) -> Any:
        reference, own = self.model, self._own_generate

        @functools.wraps(model.generate)
        def generate(*args: Any, **kwargs: Any) -> Any:
            model = reference()
            if model is None:
                raise CacheInUseError("the model is gone")
            named = call_arguments(model, args, kwargs)
            cache = next((named[name] for name in compat.CACHE_NAMES if named.get(name) is not None), None)
            original = own or functools.partial(type(model).generate, model)
            user = cache if isinstance(cache, CompressedCache) else self.session()
            if user is None:
                return original(*args, **kwargs)
            if cache is not None and user is not cache:
                user.replace(cache, named, inside=False)  # says what to do instead
            method, options = user.method, user.options
            check_generate(model, method, named, options.max_decode_slots)
            if options.preallocated is not None:
                held = 0, 0
                if isinstance(cache, CompressedCache) and cache.clock is not None:
                    held = cache.clock.appended, cache.seen
                check_preallocated(model, method, named, options.preallocated, *held)
                if cache is None and isinstance(user, Session):
                    # Before the prefill, because that is when `generate` decides whether to compile.
                    cache = kwargs[self.cache_name] = user.replace(None, named, inside=True)
            # Position ids are built before the first forward pass, from the offsets of whatever ran last.
            self._set_model_state(cache.model_state or None if isinstance(cache, CompressedCache) else None)
            local = self._local
            outer, local.generating = getattr(local, "generating", False), True
            try:
                with self.prefill_of(prefill_total(model, named)):
                    return original(*args, **kwargs)
            finally:
                local.generating = outer

        return generate

    # ---- around every forward pass

    def _before(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with _lock:
            self.running += 1
        self._local.cache = None  # a pass that failed may have left its own
        kwargs = dict(kwargs)
        if args:
            names = list(inspect.signature(model.forward).parameters)
            kwargs.update(zip(names, args, strict=False))
        cache = next((kwargs.pop(name) for name in compat.CACHE_NAMES if kwargs.get(name) is not None), None)
        for name in compat.CACHE_NAMES:
            kwargs.pop(name, None)
        if not isinstance(cache, CompressedCache):
            session = self.session()
            if session is None:
                if cache is not None:
                    kwargs[self.cache_name] = cache
                # `generate` prepares the mask itself for caches of fixed size, and models test it as a tensor.
                if "attention_mask" in kwargs:
                    kwargs["attention_mask"] = _plain_mask(kwargs["attention_mask"])
                return (), kwargs
            cache = session.replace(cache, kwargs, inside=getattr(self._local, "generating", False))
        if cache.owner is None or cache.owner() is not model:
            raise CacheInUseError(
                "this compressed cache was made for another model; make one with foveakv.cache_for(model, ...)"
            )
        if kwargs.get("output_attentions"):
            raise UnsupportedModeError("output_attentions=True: stored slots are attended to without forming weights")
        kwargs[self.cache_name] = cache
        if cache.preallocated is not None and kwargs.get("attention_mask") is not None:
            kwargs["attention_mask"] = padding_mask(kwargs["attention_mask"])
        compiled = getattr(self._local, "compiled", None) is not None
        if compiled and kwargs.get("position_ids") is None:
            raise UnsupportedModeError("a compiled step needs position_ids; `generate` passes them, pass yours too")
        self._begin(model, cache, kwargs)
        if compiled:
            kwargs["attention_mask"] = None  # it grows with every token; what it says is in the slots
        return (), kwargs

    def _begin(self, model: Any, cache: CompressedCache, kwargs: dict[str, Any]) -> None:
        local = self._local
        if not getattr(local, "generating", False):
            self._set_model_state(cache.model_state or None)
        ids, embeds = kwargs.get("input_ids"), kwargs.get("inputs_embeds")
        if ids is None:
            if embeds is None:
                raise UnsupportedModeError("a compressed model needs input_ids or inputs_embeds")
            # Ids that match no placeholder: all text, unless mm_token_type_ids says otherwise.
            ids = torch.full(embeds.shape[:2], -1, device=embeds.device)
        new, total = ids.shape[1], getattr(local, "total", None)
        prompt = None
        if not cache.prefilled:
            prompt = PromptMap.from_inputs(
                model.config,
                ids,
                _last(kwargs.get("attention_mask"), new),
                _last(kwargs.get("mm_token_type_ids"), new, total),
                _last(kwargs.get("token_type_ids"), new),
            )
        mask = kwargs.get("attention_mask") if cache.preallocated is not None else None
        cache.begin_forward(new, prompt, total, model.dtype.itemsize, batch=len(ids), mask=mask)
        local.cache = cache

    def _after(self, model: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        cache = kwargs.get(self.cache_name)
        if isinstance(cache, CompressedCache) and output is not None:  # None: the pass failed
            cache.end_forward(self._model_state())
            self._local.cache = None
        with _lock:
            self.running = max(0, self.running - 1)
            self._detach_if_idle()


def _last(mask: Any, columns: int, total: int | None = None) -> Tensor | None:
    """The newest columns of a 2-D mask or type map that covers the whole context; 4-D masks say nothing of padding.

    transformers leaves a type map of `total` columns as it is when it drafts tokens behind them: these are text, 0.
    """
    if not isinstance(mask, Tensor) or mask.ndim != 2:
        return None
    if mask.shape[1] == total and total < columns:
        mask = nn.functional.pad(mask, (0, columns - total))
    return mask[:, -columns:]


def _plain_mask(mask: Any) -> Any:
    """Masks of a plain forward pass as the base implementation takes them."""
    if isinstance(mask, dict):
        return {key: _plain_mask(value) for key, value in mask.items()}
    return mask.dense() if isinstance(mask, LazyMask) else mask


def _attachment(model: compat.PreTrainedModel) -> Attachment:
    if not isinstance(model, compat.PreTrainedModel):
        raise UnsupportedModelError(f"expected a transformers model, got {type(model).__name__}")
    with _lock:
        if model not in _attachments:
            _attachments[model] = Attachment(model)
        return _attachments[model]


def _new_cache(model: compat.PreTrainedModel, method: Method, options: CacheOptions) -> CompressedCache:
    cache = CompressedCache(compat.text_config_of(model), method, options)
    if not cache.compressed:
        raise UnsupportedModelError(f"{type(model).__name__} has no plain attention layer to compress")
    cache.owner = weakref.ref(model)
    return cache


def cache_for(
    model: compat.PreTrainedModel, method: Method, *, options: CacheOptions | None = None, **given: Any
) -> CompressedCache:
    """Make a compressed cache to pass as `past_key_values` (`cache` since transformers 5.24).

    The model stays attached until the cache is garbage-collected; other caches pass through it unchanged.

    Args:
        model: a transformers model with a text decoder.
        method: e.g. `HAE()`.
        options: the cache's options; or give the fields of `CacheOptions` as keyword arguments.

    Raises:
        MethodError: an option that is unknown, invalid, or not supported by this method or model.
        UnsupportedModelError: the model's attention cannot be compressed correctly.
    """
    _check_method(method)
    options = resolve(options, given)
    options.check(method)
    attached = _attachment(model)
    cache = _new_cache(model, method, options)
    if method.prunes_after is not None:
        hidden.check_supported(model)

    def hold(cache: CompressedCache) -> None:
        attached.acquire()
        weakref.finalize(cache, attached.release)

    cache.hold = hold
    hold(cache)
    if method.prunes_after is not None:
        attached.use_hidden_hooks()
    if cache.preallocated is not None:
        attached.use_compiled_steps()
    return cache


def compress(
    model: compat.PreTrainedModel, method: Method, *, options: CacheOptions | None = None, **given: Any
) -> Session:
    """Compress every cache that `model` makes inside the `with` block.

    Args:
        model: a transformers model with a text decoder, see `foveakv models` for tested families.
        method: e.g. `HAE()`, `HybridKV(budget=0.1)`, or `foveakv.methods.get("snapkv", budget=0.2)`.
        options: the caches' options; or give the fields of `CacheOptions` as keyword arguments, e.g. `trace=True` or
            `kv_dtype="int8"`.

    Raises:
        MethodError: an option that is unknown, invalid, or not supported by this method or model.
        CacheInUseError: on entering, when the same method object is active on another model.
        UnsupportedModelError: on entering, when the model's attention cannot be compressed correctly.
    """
    return Session(model, method, resolve(options, given))


def _check_method(method: Any) -> None:
    if not isinstance(method, Method):
        raise MethodError(f"expected a method such as foveakv.HAE(), got {type(method).__name__}: {method!r}")


class Session:
    """A `with` block in which a model's caches are compressed. `cache` is that of the latest prompt."""

    def __init__(self, model: compat.PreTrainedModel, method: Method, options: CacheOptions) -> None:
        _check_method(method)
        self.model = model
        self.method = method
        options.check(method)
        self.options = options
        self._cache: CompressedCache | None = None
        self._attached: Attachment | None = None
        self.thread = 0  # the thread that opened it

    def __enter__(self) -> Session:
        if self._attached is not None:
            raise CacheInUseError("this session is already open; call foveakv.compress() again for a second one")
        for model, other in _attachments.items():
            if model is not self.model and any(session.method is self.method for session in other.sessions):
                raise CacheInUseError("this method object is in use on another model; make a second one")
        attached = _attachment(self.model)
        if self.method.prunes_after is not None:
            hidden.check_supported(self.model)
        attached.acquire()
        if self.method.prunes_after is not None:
            attached.use_hidden_hooks()
        if self.options.preallocated is not None:
            attached.use_compiled_steps()
        self.thread = threading.get_ident()
        attached.sessions.append(self)
        self._attached = attached
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        attached, self._attached = self._attached, None
        if attached is not None:
            attached.sessions.remove(self)
            attached.release()

    def replace(self, cache: Any, kwargs: dict[str, Any], inside: bool) -> CompressedCache:
        """A fresh compressed cache in place of none, or of the empty one that `generate` (`inside`) has just made."""
        if kwargs.get("use_cache") is False:
            raise UnsupportedModeError(
                "use_cache=False leaves no cache to compress; drop it, or leave the compress() block"
            )
        if cache is not None and not (inside and type(cache) is compat.DynamicCache and cache.get_seq_length() == 0):
            raise UnsupportedModeError(
                f"{self.method.name} cannot take over a {type(cache).__name__} of yours; "
                "leave past_key_values out, or pass a cache from this session"
            )
        made = self._cache = _new_cache(self.model, self.method, self.options)
        return made

    @contextmanager
    def chunked_prefill(self, tokens: int) -> Iterator[None]:
        """For hand-written loops that feed a prompt in pieces: nothing is compressed before `tokens` tokens are in.

        `generate(prefill_chunk_size=...)` needs no such block.
        """
        if self._attached is None:
            raise CacheInUseError("chunked_prefill() works inside the session's `with` block only")
        with self._attached.prefill_of(tokens):
            yield

    @property
    def cache(self) -> CompressedCache:
        """The cache of the latest prompt."""
        if self._cache is None:
            raise CacheInUseError("nothing has been generated in this session yet")
        return self._cache

    @property
    def report(self) -> Report:
        """What happened to the latest prompt: slots, bytes, evictions, retrievals, times."""
        from foveakv.engines.transformers.report import Report

        return Report.of(self.cache)

    @property
    def trace(self) -> list[dict[int, Tensor]]:
        """For each forward pass, layer index -> LongTensor [B, H, M], the positions attended to (-1: none).

        A dense step (prefill) has no entries. Needs `compress(..., trace=True)`.
        """
        if self.cache.trace is None:
            raise CacheInUseError("no trace was recorded; use foveakv.compress(model, method, trace=True)")
        return self.cache.trace

    def kept(self, layer: int) -> Tensor:
        """Positions that model layer `layer` attends to, chunks chosen in the last step included.

        LongTensor [B, H, M], ascending, -1 behind the last.
        """
        return self.cache.kept(layer)

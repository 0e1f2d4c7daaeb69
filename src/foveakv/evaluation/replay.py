"""One prompt read once, compressed many times.

Methods act after each layer's dense attention, so what a layer computes for the prompt is the same for all of them
(unless they take tokens out of the residual stream). A recording keeps every layer's queries, keys and values of one
plain prefill; `replay` then hands copies of them to a method's cache, layer by layer, as the model would have: copies,
so that no method changes what the next one gets.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from foveakv.core.prompt import PromptMap
from foveakv.engines.transformers import compat
from foveakv.engines.transformers.api import cache_for
from foveakv.engines.transformers.cache import CompressedCache
from foveakv.errors import UnsupportedModeError
from foveakv.methods.base import Method
from foveakv.methods.views import Observes, PrefillView, PromptView, State


@dataclass
class _Seen(State):
    views: list[PrefillView] = field(default_factory=list)


@dataclass
class _Record(Method):
    """Keeps every slot and what it saw."""

    name: ClassVar[str] = "recording"

    @property
    def observes(self) -> Observes:
        return Observes(queries="all")

    def begin(self, request: PromptView) -> _Seen:
        return _Seen()

    def prefill(self, view: PrefillView) -> None:
        view.state.views.append(view)


@dataclass
class Recording:
    """A prompt's prefill: per compressed layer query [1, Hq, C, D], keys, values [1, H, C, D] and the scaling; logits
    [vocabulary] of its last token."""

    model: Any
    layers: list[tuple[Tensor, Tensor, Tensor, float]]
    prompt: PromptMap
    model_state: list[Any]
    logits: Tensor


def record(model: Any, inputs: Mapping[str, Any]) -> Recording:
    """Reads a prompt of one sequence with the plain model.

    Raises:
        UnsupportedModeError: the model has layers that are not compressed, or a mask that is not plainly causal.
    """
    cache = cache_for(model, _Record())
    if len(cache.compressed) != len(cache.layers):
        raise UnsupportedModeError("a prefill can be replayed only where every layer's cache is compressed")
    with torch.inference_mode():
        output = _forward(model, inputs, cache)
    seen = cache.state.views if isinstance(cache.state, _Seen) else []
    if any(view.visible is not None for view in seen):
        raise UnsupportedModeError("a prefill can be replayed only where its mask is plainly causal, without padding")
    layers = [(view.query, view.keys, view.values, view.scaling) for view in seen]
    return Recording(model, layers, cache.full_prompt, cache.model_state, output.logits[0, -1])


def replays(method: Method) -> bool:
    """Whether a recorded prefill serves the method: it takes no token out of the stream, and one pass is enough."""
    return method.prunes_after is None and not method.observes.second_pass


def replay(recording: Recording, method: Method, **options: Any) -> CompressedCache:
    """The cache that the method makes of the recorded prompt. `options` as for `foveakv.cache_for`.

    Its `prefill_seconds` are the method's own work and the copying of what stays, without the model's.

    Raises:
        UnsupportedModeError: the method takes tokens out of the residual stream, so that later layers would differ.
    """
    if not replays(method):
        raise UnsupportedModeError(f"{method.name} changes the prefill itself; it cannot be replayed")
    cache = cache_for(recording.model, method, **options)
    columns = recording.layers[0][1].shape[2]
    with torch.inference_mode():
        prompt = PromptMap(recording.prompt.kinds.clone(), recording.prompt.index.clone())
        cache.begin_forward(columns, prompt, None, recording.layers[0][1].element_size(), batch=1)
        copying = 0.0
        for layer, (*recorded, scaling) in zip(cache.compressed, recording.layers, strict=True):
            began = time.perf_counter()
            query, keys, values = (tensor.clone() for tensor in recorded)  # the method may write into what it sees
            copying += time.perf_counter() - began
            handle, _ = layer.update(keys, values)
            layer.end_prefill(query, handle, None, scaling)
        cache.end_forward(recording.model_state)
        cache.prefill_seconds -= copying
    return cache


def read(model: Any, inputs: Mapping[str, Any], method: Method, **options: Any) -> tuple[CompressedCache, Tensor]:
    """The same without a recording: the model reads the prompt with the method's cache; also the logits of its
    last token."""
    cache = cache_for(model, method, **options)
    with torch.inference_mode():
        return cache, _forward(model, inputs, cache).logits[0, -1]


def _forward(model: Any, inputs: Mapping[str, Any], cache: CompressedCache) -> Any:
    """One prefill as `generate` does it."""
    return model(**inputs, **{compat.cache_argument(model): cache}, use_cache=True, logits_to_keep=1)

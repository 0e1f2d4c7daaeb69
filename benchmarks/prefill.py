"""What compression adds to a prefill, and how much HAE with drop_hidden_states shortens it.

Slices of Qwen2.5-VL's text decoder with random weights; about three quarters of the prompt are visual tokens. The
main figure is `own_share`: the library's own work after each layer's attention, measured inside the whole prefill, as
a share of a plain prefill. `over_plain` compares whole prefills and has the noise of both. Plain prefills run before,
between and after the methods; `plain_drift` is their range.

The part `drop` compares whole prefills of the longest prompt with a slice of more layers (tokens are pruned after the
first layer, so a slice of two layers could at best be halved).
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable
from statistics import median
from typing import Any

import torch

import foveakv
from benchmarks.common import Recorder, clock, spread
from benchmarks.decoders import qwen, qwen_inputs, visual_tokens
from benchmarks.layers import dtype_of
from benchmarks.methods import at_budget
from foveakv import methods
from foveakv.engines.transformers import compat
from foveakv.methods import Method

BY = ("part", "context", "method")
DROPPED = 0.75  # of the visual tokens, in the part `drop`


def run(recorder: Recorder) -> None:
    """Measure the parts `overhead` and `drop`."""
    settings = recorder.settings
    parts = (
        ("overhead", settings["layers"], settings["contexts"]),
        ("drop", settings["drop_layers"], [max(settings["contexts"])]),
    )
    for part, layers, contexts in parts:
        model = None
        for context in contexts if layers else []:
            if recorder.has(part=part, context=context, method="plain"):
                continue
            if model is None:
                model = qwen(settings["geometry"], layers, dtype_of(settings["dtype"]))
            inputs = qwen_inputs(context, model.dtype)
            with torch.inference_mode():
                (_overhead if part == "overhead" else _drop)(recorder, model, inputs, context)
        del model


def _overhead(recorder: Recorder, model: Any, inputs: dict[str, Any], context: int) -> None:
    settings = recorder.settings
    chosen = at_budget(settings["budget"], context, names=settings["methods"])
    if "fastv" in chosen and settings["layers"] == 2:
        chosen["fastv"] = methods.get("fastv", layer=1)  # with two layers its default, 2, leaves no later layer
    for label, method in chosen.items():
        recorder.method(f"{label} at {context}", method)
    plain: list[float] = []
    seconds: dict[str, list[float]] = {label: [] for label in chosen}
    own: dict[str, list[float]] = {label: [] for label in chosen}
    _warm_up(model, inputs, context, chosen.values())
    middle = len(chosen) // 2
    for _ in range(settings["repeats"]):
        plain.append(_plain(model, inputs))
        for place, (label, method) in enumerate(chosen.items()):
            if place == middle:
                plain.append(_plain(model, inputs))
            whole, work = _compressed(model, inputs, method)
            seconds[label].append(whole)
            own[label].append(work)
    plain.append(_plain(model, inputs))
    base = median(plain)
    shared = {
        "part": "overhead",
        "context": context,
        "visual": visual_tokens(model, inputs),
        "layers": settings["layers"],
        "plain_drift": max(plain) / min(plain) - 1,
    }
    recorder.add(
        {
            **shared,
            "method": label,
            "ms": spread(seconds[label]),
            "own_ms": spread(own[label]),
            "own_share": median(own[label]) / base,
            "over_plain": median(seconds[label]) / base - 1,
        }
        for label in chosen
    )
    recorder.add([{**shared, "method": "plain", "ms": spread(plain)}])  # last: it marks the context as complete


def _drop(recorder: Recorder, model: Any, inputs: dict[str, Any], context: int) -> None:
    """Measure HAE with drop_hidden_states between plain prefills, in turns."""
    visual = visual_tokens(model, inputs)
    method = methods.get(
        "hae", ddes=False, target_visual_tokens=visual - int(visual * DROPPED), drop_hidden_states=True
    )
    recorder.method(f"hae (drop_hidden_states) at {context}", method)
    _warm_up(model, inputs, context, [methods.get("hae", ddes=False, target_visual_tokens=1, drop_hidden_states=True)])
    plain, dropped, own = [_plain(model, inputs)], [], []
    for _ in range(recorder.settings["repeats"]):
        whole, work = _compressed(model, inputs, method)
        dropped.append(whole)
        own.append(work)
        plain.append(_plain(model, inputs))
    base = median(plain)
    shared = {
        "part": "drop",
        "context": context,
        "visual": visual,
        "layers": recorder.settings["drop_layers"],
        "plain_drift": max(plain) / min(plain) - 1,
    }
    recorder.add(
        [
            {
                **shared,
                "method": "hae (drop_hidden_states)",
                "ms": spread(dropped),
                "own_ms": spread(own),
                "own_share": median(own) / base,
                "faster_than_plain": base / median(dropped),
            },
            {**shared, "method": "plain", "ms": spread(plain)},
        ]
    )


def _warm_up(model: Any, inputs: dict[str, Any], context: int, chosen: Iterable[Method]) -> None:
    """Run one-time work before the measurement; a short prompt is enough if the real one takes a minute."""
    short = qwen_inputs(min(context, 512), model.dtype)
    for method in chosen:
        _compressed(model, short, method)
    _plain(model, inputs if context <= 2048 else short)


def _plain(model: Any, inputs: dict[str, Any]) -> float:
    return clock(lambda: model(**inputs, use_cache=True, logits_to_keep=1))


def _compressed(model: Any, inputs: dict[str, Any], method: Method) -> tuple[float, float]:
    """Return the seconds of a prefill with the method, and of the library's own work in it."""
    cache = foveakv.cache_for(model, method)
    spent = [0.0]
    for layer in cache.compressed:
        layer.__dict__["end_prefill"] = _timed(layer.end_prefill, spent)  # on these objects only
    argument = {compat.cache_argument(model): cache}
    seconds = clock(lambda: model(**inputs, **argument, use_cache=True, logits_to_keep=1))
    for layer in cache.compressed:
        del layer.__dict__["end_prefill"]  # a reference to itself would keep the layer's memory
    return seconds, spent[0]


def _timed(work: Callable[..., Any], spent: list[float]) -> Callable[..., Any]:
    @functools.wraps(work)
    def timed(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        try:
            return work(*args, **kwargs)
        finally:
            spent[0] += time.perf_counter() - start

    return timed

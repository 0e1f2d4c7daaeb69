"""A short prompt on the embedded model: time to the first token and per token, in turns with the plain model."""

from __future__ import annotations

from statistics import median
from typing import Any

import torch

import foveakv
from benchmarks.common import Recorder, clock, spread
from benchmarks.generate import inputs_for, load
from benchmarks.methods import at_budget
from foveakv.engines.transformers import compat
from foveakv.methods import Method

BY = ("context", "method")


@torch.inference_mode()
def run(recorder: Recorder) -> None:
    """Measure one row per method, and one for the plain model."""
    settings = recorder.settings
    model, processor = load(settings["model"], 2, torch.float32)
    inputs = inputs_for(settings["model"], model, processor, settings["context"])
    length = int(inputs["input_ids"].shape[1])
    if recorder.has(context=length, method="plain"):
        return
    sides: dict[str, Method | None] = {"plain": None}
    sides |= at_budget(settings["budget"], length, names=settings["methods"])
    for label, method in sides.items():
        if method is not None:
            recorder.method(label, method)
        _once(model, inputs, method, 2)  # one-time work
    first: dict[str, list[float]] = {label: [] for label in sides}
    token: dict[str, list[float]] = {label: [] for label in sides}
    for _ in range(settings["repeats"]):
        for label, method in sides.items():
            start, steps = _once(model, inputs, method, settings["tokens"])
            first[label].append(start)
            token[label].append(median(steps))
    recorder.add(
        {
            "context": length,
            "method": label,
            "first_ms": spread(first[label]),
            "token_ms": spread(token[label]),
            "first_over_plain": median(first[label]) / median(first["plain"]),
            "token_over_plain": median(token[label]) / median(token["plain"]),
        }
        for label in sides
    )


def _once(model: Any, inputs: dict[str, Any], method: Method | None, tokens: int) -> tuple[float, list[float]]:
    """Return the seconds to the first token, and of every later one."""
    cache = compat.DynamicCache(config=model.config) if method is None else foveakv.cache_for(model, method)
    argument = {compat.cache_argument(model): cache}
    made: list[torch.Tensor] = []

    def forward(**given: Any) -> None:
        made.append(model(**given, **argument, use_cache=True, logits_to_keep=1).logits[:, -1:].argmax(-1))

    start = clock(lambda: forward(**inputs))
    return start, [clock(lambda: forward(input_ids=made[-1])) for _ in range(tokens)]

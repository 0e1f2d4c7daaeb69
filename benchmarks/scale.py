"""How the cost of a step grows with the context (exponent of a power law, fitted on log-log axes) and the batch size.

One layer; attention and cache update as in `decode_attention`. Methods run with a budget that is a share of the context
and with a fixed number of tokens per head, whose cost should not grow.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.common import Recorder, in_turns, spread
from benchmarks.layers import QUESTION, Default, Driver, Packed, Stepper, Tokens, dtype_of, peaked, shape_of
from benchmarks.methods import at_budget

BY = ("axis", "context", "batch", "method")
SCORED_ROWS = 64
WARM_UP = 2


def run(recorder: Recorder) -> None:
    settings = recorder.settings
    cases = [("context", context, 1) for context in settings["contexts"]]
    cases += [("batch", settings["batch_context"], batch) for batch in settings["batches"]]
    for axis, context, batch in cases:
        if not recorder.has(axis=axis, context=context, batch=batch):
            recorder.add(_group(recorder, axis, context, batch))


@torch.inference_mode()
def _group(recorder: Recorder, axis: str, context: int, batch: int) -> list[dict[str, Any]]:
    settings = recorder.settings
    shape, dtype = shape_of(settings["geometry"]), dtype_of(settings["dtype"])
    tensors = peaked(shape, context, settings["seed"], batch=batch, dtype=dtype)
    tokens = Tokens(shape, settings["seed"] + 1, batch=batch, dtype=dtype)
    tokens.draw(settings["repeats"] + WARM_UP)
    default = Default(shape, *tensors[1:])
    packed = Packed(shape, *tensors[1:], room=settings["repeats"] + 8)
    sides: dict[str, Any] = {
        "transformers default": Stepper(default.step, tokens),
        "packed SDPA": Stepper(packed.step, tokens),
    }
    budgets: list[float | int] = [settings["share"], settings["fixed"]]
    for budget in budgets:
        if budget == settings["fixed"] and budget >= context:
            continue
        share = budget if isinstance(budget, float) else budget / context
        for name, method in at_budget(share, context, prefill_rows=SCORED_ROWS, names=settings["methods"]).items():
            if name == "full":
                if budget != settings["share"]:
                    continue
                label = name
            else:
                label = f"{name} {budget:.0%}" if isinstance(budget, float) else f"{name} {budget} tokens"
            recorder.method(f"{label} at {context}", method)
            driver = Driver(shape, method, context, backend=settings["backend"], batch=batch, question=QUESTION)
            driver.prefill(tensors)
            sides[label] = Stepper(driver.step, tokens)
    del tensors
    seconds = in_turns(sides, settings["repeats"], warmup=WARM_UP)
    return [
        {"axis": axis, "context": context, "batch": batch, "method": name, "ms": spread(times)}
        for name, times in seconds.items()
    ]


def exponent(sizes: Sequence[float], costs: Sequence[float]) -> float:
    """Least-squares slope of log(cost) over log(size): 1 = proportional growth, 0 = no growth."""
    x, y = [math.log(size) for size in sizes], [math.log(cost) for cost in costs]
    middle_x, middle_y = sum(x) / len(x), sum(y) / len(y)
    over = sum((a - middle_x) * (b - middle_y) for a, b in zip(x, y, strict=True))
    return over / sum((a - middle_x) ** 2 for a in x)

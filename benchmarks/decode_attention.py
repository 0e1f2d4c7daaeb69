"""Attention plus cache update per layer and token, against transformers' default path and a packed full cache.

For every side the same run also times a parallel sum over the buffers that a step reads. Their ratio (`read_share`)
shows how close the step comes to reading each stored byte once, independently of the machine's memory bandwidth.
HAE evicts once in 64 steps, which medians leave out: 70 repeats include such a step, and `..._by_means` counts it.
"""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.common import Recorder, in_turns, spread
from benchmarks.layers import (
    QUESTION,
    Default,
    Driver,
    Packed,
    Stepper,
    Tokens,
    dtype_of,
    peaked,
    read_once,
    shape_of,
    storage,
)
from benchmarks.methods import at_budget

BY = ("geometry", "dtype", "backend", "context", "budget", "method")
WARM_UP = 2
SCORED_ROWS = 64  # prompt queries that HAE and H2O score: this benchmark does not measure a 128k x 128k prefill


def run(recorder: Recorder) -> None:
    """Measure one group of rows per context and budget."""
    settings = recorder.settings
    for context in settings["contexts"]:
        for budget in settings["budgets"]:
            group = {
                "geometry": settings["geometry"],
                "dtype": settings["dtype"],
                "backend": settings["backend"],
                "context": context,
                "budget": budget,
            }
            if not recorder.has(**group):
                recorder.add(_group(recorder, group))


@torch.inference_mode()
def _group(recorder: Recorder, group: dict[str, Any]) -> list[dict[str, Any]]:
    settings = recorder.settings
    shape, dtype, context = shape_of(group["geometry"]), dtype_of(group["dtype"]), group["context"]
    repeats, seed = settings["repeats"], settings["seed"]
    tensors = peaked(shape, context, seed, dtype=dtype)
    tokens = Tokens(shape, seed + 1, dtype=dtype)
    tokens.draw(repeats + WARM_UP)
    default = Default(shape, *tensors[1:])
    packed = Packed(shape, *tensors[1:], room=repeats + 8)
    sides: dict[str, Any] = {
        "transformers default": Stepper(default.step, tokens),
        "packed SDPA": Stepper(packed.step, tokens),
    }
    holders: dict[str, Any] = {"transformers default": default, "packed SDPA": packed}
    drivers: dict[str, Driver] = {}
    chosen = at_budget(
        group["budget"],
        context,
        prefill_rows=SCORED_ROWS,
        names=settings["methods"],
        digest_dtype=settings["digest_dtype"],
    )
    for name, method in chosen.items():
        recorder.method(f"{name} {group['budget']:g}", method)
        driver = drivers[name] = Driver(shape, method, context, backend=group["backend"], question=QUESTION)
        driver.prefill(tensors)
        sides[name] = Stepper(driver.step, tokens)
        holders[name] = driver
    del tensors
    # A side's read is timed right after its step, so that both start with the same processor caches.
    timed: dict[str, Any] = {}
    for name, step in sides.items():
        timed[name] = step
        timed[f"{name}: read"] = lambda holder=holders[name]: read_once(holder.read)
    seconds = in_turns(timed, repeats, warmup=WARM_UP)
    spreads = {name: spread(times) for name, times in seconds.items()}
    medians = {name: found["median"] for name, found in spreads.items()}
    rows = []
    for name in sides:
        read = storage(holders[name].read)
        row = {
            **group,
            "method": name,
            "ms": spreads[name],
            "read_ms": spreads[f"{name}: read"],
            "stored_bytes": drivers[name].cache.stored_nbytes if name in drivers else read,
            "read_bytes": read,
            "gb_per_s": read / medians[name] / 1e6,
            "read_gb_per_s": read / medians[f"{name}: read"] / 1e6,
            "read_share": medians[f"{name}: read"] / medians[name],
            "faster_than_default": medians["transformers default"] / medians[name],
            "faster_than_packed": medians["packed SDPA"] / medians[name],
            "faster_than_packed_by_means": spreads["packed SDPA"]["mean"] / spreads[name]["mean"],
        }
        if name in drivers and drivers[name].hit_rate is not None:
            row["hit_rate"] = drivers[name].hit_rate
        rows.append(row)
    return rows

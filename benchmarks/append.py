"""Measure appending decoded tokens to a long cache, without attention.

DynamicCache copies the whole cache for every token, StaticCache writes into a preallocated buffer. FoveaKV's segments
write into free room and grow geometrically, so a few appends copy. `ms` is one append, its highest value shows the
copies, and `total_ms` is the sum of all appends.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from benchmarks.common import Recorder, clock, spread
from benchmarks.layers import QUESTION, Driver, Tokens, dtype_of, peaked, shape_of
from benchmarks.methods import at_budget

BY = ("geometry", "dtype", "context", "method")
BLOCK = 50  # appends per turn


@torch.inference_mode()
def run(recorder: Recorder) -> None:
    settings = recorder.settings
    shape, dtype = shape_of(settings["geometry"]), dtype_of(settings["dtype"])
    for context in settings["contexts"]:
        group = {"geometry": settings["geometry"], "dtype": settings["dtype"], "context": context}
        if recorder.has(**group):
            continue
        tensors = peaked(shape, context, settings["seed"], dtype=dtype)
        tokens = Tokens(shape, settings["seed"] + 1, dtype=dtype)
        count = settings["tokens"]
        sides: dict[str, _Transformers | _FoveaKV] = {
            "DynamicCache": _Transformers(shape.config(1), tensors, None),
            "StaticCache": _Transformers(shape.config(1), tensors, context + count + BLOCK),
        }
        for name, method in at_budget(settings["budget"], context, names=("full", "snapkv")).items():
            recorder.method(f"{name} at {context}", method)
            driver = Driver(shape, method, context, question=QUESTION)
            driver.prefill(tensors)
            sides[name] = _FoveaKV(driver)
        del tensors
        seconds: dict[str, list[float]] = {name: [] for name in sides}
        for start in range(0, count, BLOCK):
            for name, side in sides.items():
                for step in range(start, min(start + BLOCK, count)):
                    _, key, value = tokens[step]
                    seconds[name].append(clock(functools.partial(side.append, key, value)))
        total = {name: sum(times) * 1e3 for name, times in seconds.items()}
        recorder.add(
            {
                **group,
                "method": name,
                "tokens": count,
                "ms": spread(seconds[name]),
                "total_ms": total[name],
                "faster_than_dynamic": total["DynamicCache"] / total[name],
            }
            for name in sides
        )


class _Transformers:
    def __init__(self, config: Any, tensors: Any, room: int | None) -> None:
        from transformers import DynamicCache, StaticCache

        self.cache = DynamicCache(config=config) if room is None else StaticCache(config=config, max_cache_len=room)
        self.cache.update(*tensors[1:], 0)

    def append(self, key: torch.Tensor, value: torch.Tensor) -> None:
        self.cache.update(key, value, 0)


class _FoveaKV:
    def __init__(self, driver: Driver) -> None:
        self.cache = driver.cache

    def append(self, key: torch.Tensor, value: torch.Tensor) -> None:
        self.cache.begin_forward(1, None, None, key.element_size())
        self.cache.compressed[0].update(key, value)
        self.cache.end_forward([])

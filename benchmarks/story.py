"""HAE's story setting, end to end: 1,024 tokens of KV, a recycle bin of 128, 512 new tokens, 5 beams.

Runs `generate` on a long prompt with many images, once per side and round, in turns. Both full caches are included:
transformers' default and FoveaKV's method `full`.
"""

from __future__ import annotations

import time
from typing import Any

import torch

import foveakv
from benchmarks.common import Recorder, spread
from benchmarks.generate import inputs_for, load
from benchmarks.layers import dtype_of
from foveakv.engines.transformers import compat
from foveakv.evaluation.compare import storage_nbytes
from foveakv.methods import Method, get
from foveakv.util.timing import StepClock

BY = ("model", "context", "method")
PAPER = "phi-3.5-vision-story"  # preset with the paper's settings for stories


def run(recorder: Recorder) -> None:
    settings = recorder.settings
    if recorder.has(model=settings["model"]):
        return
    model, processor = load(settings["model"], settings["layers"], dtype_of(settings["dtype"]))
    inputs = inputs_for(settings["model"], model, processor, settings["context"])
    hae = get("hae", preset=PAPER, budget=settings["kv_size"], recycle_bin_size=settings["bin"])
    methods: dict[str, Method | None] = {"transformers default": None, "full": get("full"), "hae": hae}
    for label, method in methods.items():
        if method is not None:
            recorder.method(label, method)
    runs: dict[str, list[dict[str, Any]]] = {label: [] for label in methods}
    for _ in range(settings["repeats"]):
        for label, method in methods.items():
            runs[label].append(_once(model, inputs, method, settings))
    seconds = {label: spread([run["seconds"] for run in done], scale=1.0) for label, done in runs.items()}
    best = min(seconds["transformers default"]["median"], seconds["full"]["median"])
    recorder.add(
        {
            "model": settings["model"],
            "context": inputs["input_ids"].shape[1],
            "method": label,
            "beams": settings["beams"],
            "new_tokens": runs[label][-1]["new_tokens"],
            "end_to_end_s": seconds[label],
            "first_token_s": min(run["first_token_s"] for run in runs[label]),
            "token_ms": spread([step for run in runs[label] for step in run["steps"]]),
            "stored_bytes": runs[label][-1]["stored_bytes"],
            "faster_than_default": seconds["transformers default"]["median"] / seconds[label]["median"],
            "faster_than_best_full": best / seconds[label]["median"],
            "flushes": runs[label][-1]["flushes"],
        }
        for label in methods
    )


@torch.inference_mode()
def _once(model: Any, inputs: dict[str, Any], method: Method | None, settings: dict[str, Any]) -> dict[str, Any]:
    options = {
        "max_new_tokens": settings["tokens"],
        "min_new_tokens": settings["tokens"],
        "num_beams": settings["beams"],
        "do_sample": False,
    }
    if method is None:
        cache = compat.DynamicCache(config=compat.text_config_of(model))
        with StepClock(model) as clock:
            start = time.perf_counter()
            output = model.generate(**inputs, **options, **{compat.cache_argument(model): cache})
            seconds = time.perf_counter() - start
        stored, flushes = storage_nbytes(cache), None
    else:
        with foveakv.compress(model, method, backend=settings["backend"]) as session, StepClock(model) as clock:
            start = time.perf_counter()
            output = model.generate(**inputs, **options)
            seconds = time.perf_counter() - start
            stored, flushes = session.cache.stored_nbytes, session.report.flushes
    return {
        "seconds": seconds,
        "first_token_s": clock.prefill_seconds,
        "steps": clock.seconds[1:],
        "new_tokens": output.shape[1] - inputs["input_ids"].shape[1],
        "stored_bytes": stored,
        "flushes": flushes,
    }

"""Many requests at once in a fixed KV memory: one at a time, stored whole in a batch, and compressed in a batch.

Every side gets an engine of its own with the same number of bytes. The requests come at once, each a prompt of images
with a fixed number of new tokens. Sides that run few requests at a time are given fewer of them, since their tokens per
second do not depend on the length of the queue; times to the first token are then those of the shorter queue.
"""

from __future__ import annotations

import gc
import threading
import time
from statistics import quantiles
from typing import Any

from benchmarks.common import Recorder, spread
from benchmarks.generate import inputs_for, load
from benchmarks.layers import dtype_of
from benchmarks.methods import at_budget
from foveakv.engines.transformers.options import CacheOptions
from foveakv.methods import Method
from foveakv.methods.full import Full
from foveakv.serving.choice import Choice, Policy
from foveakv.serving.engine import Delta, Done, Event, Failed, Generation
from foveakv.serving.limits import Limits
from foveakv.serving.sampling import Sampling
from foveakv.serving.transformers_engine import TransformersEngine

BY = ("context", "tokens", "method")
ALONE = "one at a time"


def run(recorder: Recorder) -> None:
    """Measure one row per side and length of answers."""
    settings = recorder.settings
    model, processor = load(settings["model"], 2, dtype_of(settings["dtype"]))
    inputs = inputs_for(settings["model"], model, processor, settings["context"])
    model.generation_config.eos_token_id = -1  # answers have the length that is asked for
    length = int(inputs["input_ids"].shape[1])
    sides: dict[str, Method] = {ALONE: Full(), "full": Full()}
    sides |= at_budget(settings["budget"], length, names=settings["methods"])
    for tokens in settings["tokens"]:
        for label, method in sides.items():
            if recorder.has(context=length, tokens=tokens, method=label):
                continue
            recorder.method(label, method)
            recorder.add([_side(settings, model, processor or tokenizer(), inputs, tokens, label, method)])
            gc.collect()


def _side(
    settings: dict[str, Any], model: Any, processor: Any, inputs: Any, tokens: int, label: str, method: Method
) -> dict[str, Any]:
    pool, clients = settings["pool"], settings["clients"]
    length = int(inputs["input_ids"].shape[1])
    engine = TransformersEngine(model, processor, policy=Policy("full"), stall=settings["stall"])
    whole = engine.sizes.estimate(Full(), CacheOptions(), length, tokens)
    engine.close()
    most = 1 if label == ALONE else clients
    limits = Limits(max_running=most, max_queue=clients, kv_bytes=pool * whole, request_seconds=3600.0)
    engine = TransformersEngine(model, processor, policy=Policy("full"), limits=limits, stall=settings["stall"])
    one = Generation(inputs, Choice(method, CacheOptions(), True), tokens, sampling=Sampling(temperature=0))
    count = min(clients, {ALONE: 2, "full": 2 * pool}.get(label, clients))
    try:
        sinks = [Client(engine) for _ in range(count)]
        began = time.perf_counter()
        for sink in sinks:
            sink.send(one)
        for sink in sinks:
            sink.done.wait()
            if sink.error is not None:
                raise SystemExit(f"a request of {label} has failed: {sink.error}")
        seconds = time.perf_counter() - began
    finally:
        engine.close()
    gaps = [after - before for sink in sinks for before, after in zip(sink.times, sink.times[1:], strict=False)]
    firsts = [sink.times[0] - sink.sent for sink in sinks]
    return {
        "context": length,
        "tokens": tokens,
        "method": label,
        "requests": count,
        "pool_bytes": pool * whole,
        "side_by_side": max(sink.together for sink in sinks),
        "tokens_per_second": count * tokens / seconds,
        "first_ms": {**spread(firsts), "p95": 1e3 * _p95(firsts)},
        "token_ms": {**spread(gaps), "p95": 1e3 * _p95(gaps)},
        "stored_bytes": max(sink.stored for sink in sinks),
    }


def _p95(values: list[float]) -> float:
    return quantiles(values, n=20, method="inclusive")[-1] if len(values) > 1 else values[0]


class Client:
    """Sends one request. times: when each piece of the answer came. together: the most answers seen at once."""

    def __init__(self, engine: TransformersEngine) -> None:
        self.engine = engine
        self.times: list[float] = []
        self.together = 0
        self.stored = 0
        self.sent = 0.0
        self.error: Exception | None = None
        self.done = threading.Event()

    def send(self, one: Generation) -> None:
        self.sent = time.perf_counter()
        self.engine.submit(one, self)

    def __call__(self, event: Event) -> None:
        if isinstance(event, Delta):
            self.times.append(time.perf_counter())
            self.together = max(self.together, len(self.engine.answering()))
            self.stored = max(self.stored, self.engine.status().stored_bytes)
        if isinstance(event, Failed):
            self.done.set()
            self.error = event.error
        if isinstance(event, Done):
            self.done.set()


def tokenizer() -> Any:
    """A tokenizer whose tokens are words, for models with random weights."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {f"w{number} ": number for number in range(1000)}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w0 ")), eos_token="w1 "
    )

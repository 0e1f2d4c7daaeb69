"""Whole models: time to the first token and per output token, full and compressed caches in turns.

Every side holds its own cache of the same prompt; then the sides take turns of `block` tokens until each has generated
`tokens`. The prompt gets into the caches in one of two ways. "read": the model's own forward pass, which gives the time
to the first token. "filled": random keys and values go through the code that a forward pass runs for every layer
(`update` and `end_prefill` of FoveaKV's layers, `update` of DynamicCache and StaticCache), because a pass over 32k
tokens takes minutes on a small machine. There is no time to the first token then; decoding is the same.

The full caches are transformers' default (DynamicCache, sdpa), its StaticCache, and FoveaKV's method `full` (all
tokens, packed query groups). Speed-ups are relative to the fastest of the three.
"""

from __future__ import annotations

import gc
import time
from typing import Any

import torch
from torch import Tensor

import foveakv
from benchmarks import decoders
from benchmarks.common import Recorder, seeded, spread
from benchmarks.layers import QUESTION, dtype_of, fill, prompt
from benchmarks.methods import at_budget
from foveakv.engines.transformers import compat
from foveakv.evaluation.compare import storage_nbytes
from foveakv.methods import Method

BY = ("model", "context", "method")
FULL_PATHS = ("transformers default", "StaticCache", "full")
WARM_UP = 2  # tokens of each side that are not counted
READ_UP_TO = 8192  # tokens; longer prompts are filled


def run(recorder: Recorder) -> None:
    """Measure one group of rows per model and context."""
    settings = recorder.settings
    for name in settings["models"]:
        model = processor = None
        for context in settings["contexts"]:
            if recorder.has(model=name, asked=context):
                continue
            if model is None:
                model, processor = load(name, settings["layers"], dtype_of(settings["dtype"]))
            recorder.add(_group(recorder, name, model, processor, context))
            gc.collect()


def load(name: str, layers: int, dtype: torch.dtype) -> tuple[Any, Any]:
    """The embedded model with its processor, or a slice of Qwen2.5-VL without one."""
    if name == "demo":
        loaded = foveakv.load("demo", dtype=str(dtype).removeprefix("torch."), device="cpu")
        return loaded.model, loaded.processor
    return decoders.qwen(name, layers, dtype), None


def inputs_for(name: str, model: Any, processor: Any, context: int) -> dict[str, Any]:
    if name == "demo":
        return decoders.card_inputs(processor, model, context)
    return decoders.qwen_inputs(context, model.dtype)


@torch.inference_mode()
def _group(recorder: Recorder, name: str, model: Any, processor: Any, context: int) -> list[dict[str, Any]]:
    settings = recorder.settings
    read = settings["prompt"] == "read" or (settings["prompt"] == "auto" and context <= READ_UP_TO)
    inputs = inputs_for(name, model, processor, context) if read else None
    length = context if inputs is None else inputs["input_ids"].shape[1]
    blocks = -(-settings["tokens"] // settings["block"])
    room = length + blocks * settings["block"] + WARM_UP
    sides: list[Side] = [
        Plain("transformers default", model, lambda config: compat.DynamicCache(config=config)),
        Plain("StaticCache", model, lambda config: _static(config, room)),
    ]
    for label, method in at_budget(
        settings["budget"], length, prefill_rows="all" if read else 64, names=settings["methods"]
    ).items():
        recorder.method(f"{label} {settings['budget']:g} at {name} {context}", method)
        sides.append(Compressed(label, model, method, settings["backend"]))
    if inputs is not None:
        sides[0].read(inputs)  # the first pass includes one-time work
        sides[0].forget()
        for side in sides:
            side.read(inputs)
    else:
        tensors = _random_tensors(model, length, settings["batch"])
        for side in sides:
            side.fill(tensors)
        del tensors
    for number in range(blocks):
        for side in sides:
            side.steps(settings["block"] if number else settings["block"] + WARM_UP)
    return _rows(name, context, length, "read" if read else "filled", settings, sides)


def _rows(
    name: str, asked: int, length: int, how: str, settings: dict[str, Any], sides: list[Side]
) -> list[dict[str, Any]]:
    times = {side.name: side.seconds[WARM_UP:] for side in sides}
    medians = {label: spread(seconds)["median"] for label, seconds in times.items()}
    means = {label: 1e3 * sum(seconds) / len(seconds) for label, seconds in times.items()}
    full = [side.name for side in sides if side.name in FULL_PATHS]
    fastest = min(full, key=medians.__getitem__)
    rows = []
    for side in sides:
        label = side.name
        whole = None if side.first is None else side.first + means[label] / 1e3 * settings["tokens"]
        rows.append(
            {
                "model": name,
                "asked": asked,
                "context": length,
                "prompt": how,
                "batch": settings["batch"],
                "budget": settings["budget"],
                "method": label,
                "first_token_s": side.first,
                "token_ms": spread(times[label]),
                "token_mean_ms": means[label],
                "end_to_end_s": whole,
                "stored_bytes": side.stored,
                "best_full_path": fastest,
                "faster_than_default": medians["transformers default"] / medians[label],
                "faster_than_best_full": medians[fastest] / medians[label],
                "faster_than_best_full_by_means": min(means[name] for name in full) / means[label],
                "hit_rate": side.hit_rate,
                "same_tokens": sum(a == b for a, b in zip(side.made, sides[0].made, strict=True)) / len(side.made),
            }
        )
    return rows


class Side:
    """One cache of the prompt, and the model that decodes with it."""

    def __init__(self, name: str, model: Any) -> None:
        self.name, self.model = name, model
        self.argument = compat.cache_argument(model)
        self.cache: Any = None
        self.first: float | None = None  # seconds to the first token
        self.seconds: list[float] = []
        self.made: list[list[int]] = []  # ids of each step
        self.position = 0
        self.token: Tensor = torch.empty(0)

    def read(self, inputs: dict[str, Any]) -> None:
        """Read the prompt in the model's forward pass."""
        start = time.perf_counter()
        output = self._forward(**inputs, logits_to_keep=1)
        self.token = output.logits[:, -1:].argmax(-1)
        self.first = time.perf_counter() - start
        self.position = inputs["input_ids"].shape[1]

    def forget(self) -> None:
        self.cache, self.first = None, None

    def fill(self, tensors: tuple[Tensor, Tensor, Tensor]) -> None:
        """Fill the cache with random keys and values."""
        self._fill(*tensors)
        self.position = tensors[1].shape[2]
        self.token = torch.full((len(tensors[1]), 1), 10)

    def steps(self, count: int) -> None:
        """Generate `count` tokens greedily."""
        multimodal_rope = hasattr(self.model.model, "rope_deltas")
        for _ in range(count):
            positions = torch.full((len(self.token), 1), self.position)
            start = time.perf_counter()
            output = self._forward(
                input_ids=self.token, position_ids=positions.expand(3, -1, -1) if multimodal_rope else positions
            )
            self.token = output.logits[:, -1:].argmax(-1)
            self.seconds.append(time.perf_counter() - start)
            self.made.append(self.token.flatten().tolist())
            self.position += 1

    def _forward(self, **inputs: Any) -> Any:
        raise NotImplementedError

    def _fill(self, query: Tensor, keys: Tensor, values: Tensor) -> None:
        raise NotImplementedError

    @property
    def stored(self) -> int:
        return storage_nbytes(self.cache)

    @property
    def hit_rate(self) -> float | None:
        return None


class Plain(Side):
    """One of transformers' caches and the plain model."""

    def __init__(self, name: str, model: Any, make: Any) -> None:
        super().__init__(name, model)
        self._make = make

    def _forward(self, **inputs: Any) -> Any:
        if self.cache is None:
            self.cache = self._make(compat.text_config_of(self.model))
        return self.model(**inputs, **{self.argument: self.cache}, use_cache=True)

    def _fill(self, query: Tensor, keys: Tensor, values: Tensor) -> None:
        self.cache = self._make(compat.text_config_of(self.model))
        for index in range(len(self.cache.layers)):
            self.cache.update(keys, values, index)


class Compressed(Side):
    """A compressed cache. The model is attached only while this side runs, so that other sides see the plain model."""

    def __init__(self, name: str, model: Any, method: Method, backend: str) -> None:
        super().__init__(name, model)
        self.method, self.backend = method, backend

    def read(self, inputs: dict[str, Any]) -> None:
        with foveakv.compress(self.model, self.method, backend=self.backend) as session:
            super().read(inputs)
            self.cache = session.cache

    def steps(self, count: int) -> None:
        with foveakv.compress(self.model, self.method, backend=self.backend):
            super().steps(count)

    def _forward(self, **inputs: Any) -> Any:
        own = {} if self.cache is None else {self.argument: self.cache}
        return self.model(**inputs, **own, use_cache=True)

    def _fill(self, query: Tensor, keys: Tensor, values: Tensor) -> None:
        with foveakv.compress(self.model, self.method, backend=self.backend) as session:
            self.cache = session.replace(None, {}, inside=False)
            described = prompt(keys.shape[2], batch=len(keys), question=QUESTION)
            fill(self.cache, (query, keys, values), described, query.shape[-1] ** -0.5)

    @property
    def stored(self) -> int:
        return self.cache.stored_nbytes

    @property
    def hit_rate(self) -> float | None:
        from foveakv.engines.transformers.report import Report

        return Report.of(self.cache).hit_rate


def _random_tensors(model: Any, length: int, batch: int) -> tuple[Tensor, Tensor, Tensor]:
    """Query, keys and values in the shape of one layer of this model; all layers get the same."""
    from benchmarks.layers import Shape, peaked

    config = compat.text_config_of(model)
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    shape = Shape(config.num_attention_heads, config.num_key_value_heads, dim)
    return peaked(shape, length, batch=batch, dtype=model.dtype)


def _static(config: Any, room: int) -> Any:
    from transformers import StaticCache

    return StaticCache(config=config, max_cache_len=room)


def text_ids(batch: int, length: int) -> Tensor:
    """Random ids of text tokens for the slices: int64 [batch, length]."""
    return torch.randint(10, 900, (batch, length), generator=seeded(1))

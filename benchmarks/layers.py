"""Layers in the geometry of a real model, without the model: random queries, keys and values drive the library's code.

A 7B model at 32k tokens does not fit on a small machine; one of its attention layers does, and the cache's work per
layer does not depend on the rest of the model.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from foveakv.core.prompt import IMAGE, TEXT, PromptMap
from foveakv.engines.transformers.cache import CompressedCache
from foveakv.engines.transformers.options import CacheOptions
from foveakv.methods import Method, ModelFacts

QUESTION = 128  # text tokens after the image, for benchmarks of decoding
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
Tensors = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Shape:
    """Query heads, KV heads and head dim of one attention layer."""

    query_heads: int
    kv_heads: int
    head_dim: int

    @property
    def scaling(self) -> float:
        return self.head_dim**-0.5

    @property
    def group(self) -> int:
        return self.query_heads // self.kv_heads

    def config(self, layers: int) -> Any:
        from transformers import LlamaConfig

        return LlamaConfig(
            hidden_size=self.query_heads * self.head_dim,
            num_attention_heads=self.query_heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim,
            num_hidden_layers=layers,
        )


SHAPES = {
    "qwen2.5-vl-7b": Shape(28, 4, 128),
    "qwen2.5-vl-3b": Shape(16, 2, 128),
    "llava-1.5": Shape(32, 32, 128),
    "demo": Shape(9, 3, 64),
}


def shape_of(geometry: str) -> Shape:
    if geometry not in SHAPES:
        raise SystemExit(f"no geometry {geometry!r}; choose one of {', '.join(SHAPES)}")
    return SHAPES[geometry]


def dtype_of(name: str) -> torch.dtype:
    if name not in DTYPES:
        raise SystemExit(f"no dtype {name!r}; choose one of {', '.join(DTYPES)}")
    return DTYPES[name]


def prompt(tokens: int, visual_share: float = 0.75, batch: int = 1, question: int | None = None) -> PromptMap:
    """Text, one long image, text: the image takes `visual_share` of the tokens and follows an eighth of the text.

    With `question`, at most this number of text tokens follows the image. HAE scores every text token after an image,
    so this keeps prompts of 128k tokens affordable if only decoding is measured.
    """
    kinds = torch.full((batch, tokens), TEXT, dtype=torch.int8)
    visual = int(tokens * visual_share)
    text = tokens - visual
    start = text // 8 if question is None else text - min(question, text // 2)
    kinds[:, start : start + visual] = IMAGE
    return PromptMap(kinds)


def peaked(shape: Shape, tokens: int, seed: int = 0, *, batch: int = 1, dtype: torch.dtype = torch.float32) -> Tensors:
    """Random query [B, Hq, C, D], keys and values [B, H, C, D]: attention peaked in some heads, flat in others.

    With plain noise all heads are alike and get the same class; a factor on the keys makes them differ. All query heads
    share memory (67 MB instead of 1.9 GB at 128k tokens): this query only scores the prompt, timed steps have others.
    """
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(batch, 1, tokens, shape.head_dim, generator=generator).to(dtype)
    keys = torch.randn(batch, shape.kv_heads, tokens, shape.head_dim, generator=generator)
    keys *= torch.linspace(0.5, 4.0, shape.kv_heads)[:, None, None]
    values = torch.randn(batch, shape.kv_heads, tokens, shape.head_dim, generator=generator).to(dtype)
    return query.expand(-1, shape.query_heads, -1, -1), keys.to(dtype), values


class Driver:
    """A compressed cache of a few layers, fed as a model would feed it."""

    def __init__(
        self,
        shape: Shape,
        method: Method,
        tokens: int,
        layers: int = 1,
        backend: str = "auto",
        batch: int = 1,
        question: int | None = None,
    ) -> None:
        self.shape = shape
        facts = ModelFacts(tuple(range(layers)), layers, "benchmark", lambda: "0" * 64)
        self.cache = CompressedCache(shape.config(layers), method.for_model(facts), CacheOptions(backend=backend))
        self.tokens = tokens
        self.batch, self.question = batch, question
        self.mask = None

    def prefill(self, tensors: Tensors) -> None:
        """Run what the library does after the dense attention of each layer; the attention itself is left out."""
        fill(self.cache, tensors, prompt(self.tokens, batch=self.batch, question=self.question), self.shape.scaling)

    def step(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """One decode step of every layer: append and attend. query [B, Hq, 1, D], key and value [B, H, 1, D]."""
        self.cache.begin_forward(1, None, None, key.element_size())
        output = query
        for layer in self.cache.compressed:
            layer.update(key, value)
            output = layer.attend(query, self.mask, self.shape.scaling)
        self.cache.end_forward([])
        return output

    @property
    def read(self) -> list[Tensor]:
        """What a decode step reads of the stored prompt: keys, values, and the digests of chunks.

        Chunks that are read in place count as the same number of rows from the beginning of their store.
        """
        found = []
        for layer in self.cache.compressed:
            if layer.segments is not None:
                found += [layer.segments.runs.keys, layer.segments.runs.values]
            store = layer.store
            if store is None:
                continue
            found.append(store.digests)
            if store.in_place and store.choosing:
                keys, values, table = store.pages()
                count = int((table >= 0).sum())
                found += [keys[:count], values[:count]]
        return found

    @property
    def hit_rate(self) -> float | None:
        """Share of the retrieved slots that were already loaded; None for methods that do not retrieve."""
        retrieved = sum(layer.counts.retrieved for layer in self.cache.compressed)
        hits = sum(layer.counts.hits for layer in self.cache.compressed)
        return hits / retrieved if retrieved else None


def fill(cache: CompressedCache, tensors: Tensors, described: PromptMap, scaling: float) -> None:
    """Give every layer of a new cache the same prompt, through the code that a model's forward pass runs."""
    query, keys, values = tensors
    cache.begin_forward(keys.shape[2], described, None, keys.element_size())
    for layer in cache.compressed:
        handle, _ = layer.update(keys, values)
        layer.end_prefill(query, handle, None, scaling)
    cache.end_forward([])


class Packed:
    """The fastest full cache in plain PyTorch: preallocated, the query group packed as rows of one SDPA call."""

    def __init__(self, shape: Shape, keys: Tensor, values: Tensor, room: int) -> None:
        self.shape, self.length = shape, keys.shape[2]
        self.keys = torch.cat([keys, keys.new_zeros(*keys.shape[:2], room, keys.shape[3])], dim=2)
        self.values = torch.cat([values, values.new_zeros(*values.shape[:2], room, values.shape[3])], dim=2)

    def step(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        self.keys[:, :, self.length : self.length + 1] = key
        self.values[:, :, self.length : self.length + 1] = value
        self.length += 1
        packed = query.view(len(query), self.shape.kv_heads, self.shape.group, self.shape.head_dim)
        keys, values = self.keys[:, :, : self.length], self.values[:, :, : self.length]
        return F.scaled_dot_product_attention(packed, keys, values, scale=self.shape.scaling)

    @property
    def read(self) -> list[Tensor]:
        return [self.keys, self.values]


class Default:
    """transformers' own path: DynamicCache, sdpa."""

    def __init__(self, shape: Shape, keys: Tensor, values: Tensor) -> None:
        from transformers import DynamicCache
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        self.attention = sdpa_attention_forward
        self.shape = shape
        self.module = SimpleNamespace(num_key_value_groups=shape.group, is_causal=True, training=False)
        self.cache = DynamicCache()
        self.cache.update(keys, values, 0)

    def step(self, query: Tensor, key: Tensor, value: Tensor) -> Any:
        keys, values = self.cache.update(key, value, 0)
        return self.attention(self.module, query, keys, values, None, scaling=self.shape.scaling)

    @property
    def read(self) -> list[Tensor]:
        return [self.cache.layers[0].keys, self.cache.layers[0].values]


class Tokens:
    """New tokens for the steps, the same for all sides: queries that drift, so that retrieval has something to load.

    Consecutive queries correlate by `correlation`. Methods that retrieve report the resulting hit rate.
    """

    def __init__(
        self, shape: Shape, seed: int, *, batch: int = 1, dtype: torch.dtype = torch.float32, correlation: float = 0.9
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.made: list[Tensors] = []
        self.shape, self.batch, self.dtype = shape, batch, dtype
        self.correlation = correlation
        self._draw = lambda heads: torch.randn(batch, heads, 1, shape.head_dim, generator=generator)
        self._query = self._draw(shape.query_heads)

    def __getitem__(self, step: int) -> Tensors:
        self.draw(step + 1)
        return self.made[step]

    def draw(self, count: int) -> None:
        """Draw the first `count` tokens in advance, so that no side spends time on it."""
        while len(self.made) < count:
            fresh = self._draw(self.shape.query_heads)
            self._query = self.correlation * self._query + (1 - self.correlation**2) ** 0.5 * fresh
            key, value = self._draw(self.shape.kv_heads), self._draw(self.shape.kv_heads)
            self.made.append((self._query.to(self.dtype), key.to(self.dtype), value.to(self.dtype)))


class Stepper:
    """Call `step` with the next token each time."""

    def __init__(self, step: Any, tokens: Tokens) -> None:
        self._step, self._tokens, self._next = step, tokens, 0

    def __call__(self) -> None:
        token = self._tokens[self._next]
        self._next += 1
        self._step(*token)


def one_token(shape: Shape, seed: int) -> Tensors:
    return Tokens(shape, seed)[0]


def read_once(buffers: list[Tensor]) -> float:
    """Read every byte of contiguous buffers once, in parallel: a lower bound for any pass over them."""
    return float(sum(tensor.detach().flatten().view(torch.float32).sum() for tensor in buffers))


def storage(buffers: list[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in buffers)

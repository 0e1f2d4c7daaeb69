"""Layers of a real geometry without a model: random queries, keys and values drive the library's own code.

A whole 7B model does not fit a small machine at 32k tokens; one attention layer of it does, and the cache's work per
layer does not depend on the rest.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from foveakv.cache import CompressedCache
from foveakv.methods import Method
from foveakv.prompt import IMAGE, TEXT, PromptMap


@dataclass(frozen=True)
class Shape:
    """Query heads, KV heads and head dim of one attention layer."""

    query_heads: int
    kv_heads: int
    head_dim: int

    @property
    def scaling(self) -> float:
        return self.head_dim**-0.5

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


def prompt(tokens: int, visual_share: float = 0.75) -> PromptMap:
    """Text, one long image, text: the image takes `visual_share` of the tokens and follows an eighth of the text."""
    kinds = torch.full((1, tokens), TEXT, dtype=torch.int8)
    visual = int(tokens * visual_share)
    start = (tokens - visual) // 8
    kinds[:, start : start + visual] = IMAGE
    return PromptMap(kinds)


def peaked(shape: Shape, tokens: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Random query [1, Hq, C, D], keys and values [1, H, C, D]: attention peaked in some heads, flat in others.

    With plain noise every head looks alike and a head classification is all or nothing; the factor spreads them.
    """
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(1, shape.query_heads, tokens, shape.head_dim, generator=generator)
    keys = torch.randn(1, shape.kv_heads, tokens, shape.head_dim, generator=generator)
    values = torch.randn(1, shape.kv_heads, tokens, shape.head_dim, generator=generator)
    factor = torch.linspace(0.5, 4.0, shape.kv_heads).repeat_interleave(shape.query_heads // shape.kv_heads)
    return query * factor[None, :, None, None], keys, values


class Driver:
    """A compressed cache of a few layers, fed as a model would feed it."""

    def __init__(self, shape: Shape, method: Method, tokens: int, layers: int = 1, backend: str = "auto") -> None:
        self.shape = shape
        self.cache = CompressedCache(shape.config(layers), method, backend=backend)
        self.tokens = tokens
        self.mask = None

    def prefill(self, tensors: tuple[Tensor, Tensor, Tensor]) -> None:
        """Everything the library does after the dense attention of each layer (which is left out)."""
        query, keys, values = tensors
        self.cache.begin_forward(self.tokens, prompt(self.tokens), None, keys.element_size())
        for layer in self.cache.compressed:
            handle, _ = layer.update(keys, values)
            layer.end_prefill(query, handle, self.mask, self.shape.scaling)
        self.cache.end_forward([])

    def step(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """One decode step of every layer: append and attend. query [1, Hq, 1, D], key and value [1, H, 1, D]."""
        self.cache.begin_forward(1, None, None, key.element_size())
        output = query
        for layer in self.cache.compressed:
            layer.update(key, value)
            output = layer.attend(query, self.mask, self.shape.scaling)
        self.cache.end_forward([])
        return output


def one_token(shape: Shape, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    draw = lambda heads: torch.randn(1, heads, 1, shape.head_dim, generator=generator)  # noqa: E731
    return draw(shape.query_heads), draw(shape.kv_heads), draw(shape.kv_heads)


def as_module(shape: Shape) -> Any:
    """What transformers' sdpa function reads of an attention module."""
    return SimpleNamespace(num_key_value_groups=shape.query_heads // shape.kv_heads, is_causal=True, training=False)

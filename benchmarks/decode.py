"""Attention plus cache update per layer and token, against transformers' default path and a packed full cache."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F
from transformers import DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from benchmarks.common import in_turns, spread
from benchmarks.layers import SHAPES, Driver, Shape, as_module, one_token, peaked
from benchmarks.methods import at_budget


class Packed:
    """The best full cache in plain PyTorch: preallocated, the query group packed as rows of one SDPA call."""

    def __init__(self, shape: Shape, keys: torch.Tensor, values: torch.Tensor, room: int) -> None:
        self.shape, self.length = shape, keys.shape[2]
        self.keys = torch.cat([keys, keys.new_zeros(*keys.shape[:2], room, keys.shape[3])], dim=2)
        self.values = torch.cat([values, values.new_zeros(*values.shape[:2], room, values.shape[3])], dim=2)

    def step(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        self.keys[:, :, self.length : self.length + 1] = key
        self.values[:, :, self.length : self.length + 1] = value
        self.length += 1
        group = self.shape.query_heads // self.shape.kv_heads
        packed = query.view(1, self.shape.kv_heads, group, self.shape.head_dim)
        keys, values = self.keys[:, :, : self.length], self.values[:, :, : self.length]
        return F.scaled_dot_product_attention(packed, keys, values, scale=self.shape.scaling)


def run(geometry: str, contexts: list[int], budget: float, repeats: int, backend: str) -> list[dict[str, Any]]:
    rows = []
    shape = SHAPES[geometry]
    for context in contexts:
        tensors = peaked(shape, context)
        token = one_token(shape, 1)
        module = as_module(shape)
        plain = DynamicCache()
        plain.update(tensors[1], tensors[2], 0)

        def default(plain: Any = plain, token: Any = token, module: Any = module) -> Any:
            keys, values = plain.update(token[1], token[2], 0)
            return sdpa_attention_forward(module, token[0], keys, values, None, scaling=shape.scaling)

        packed = Packed(shape, tensors[1], tensors[2], room=repeats + 8)
        sides: dict[str, Any] = {
            "transformers default": default,
            "packed SDPA": lambda packed=packed, token=token: packed.step(*token),
        }
        stored = {"transformers default": tensors[1].nbytes * 2, "packed SDPA": tensors[1].nbytes * 2}
        drivers = {}
        for name, method in at_budget(budget, context, prefill_rows=64).items():
            # fastv compresses from its third layer on only.
            driver = Driver(shape, method, context, layers=1, backend=backend)
            if name == "fastv":
                continue
            driver.prefill(tensors)
            drivers[name] = driver
            stored[name] = driver.cache.stored_nbytes
            sides[name] = lambda driver=driver, token=token: driver.step(*token)
        with torch.inference_mode():
            seconds = in_turns(sides, repeats, warmup=2)
        medians = {name: spread(times)["median"] for name, times in seconds.items()}
        for name, times in seconds.items():
            rows.append(
                {
                    "geometry": geometry,
                    "context": context,
                    "budget": budget,
                    "method": name,
                    "ms": spread(times),
                    "bytes": stored[name],
                    "faster_than_default": medians["transformers default"] / medians[name],
                    "faster_than_packed": medians["packed SDPA"] / medians[name],
                }
            )
    return rows

"""How many bytes a request's caches will take, before it runs."""

from __future__ import annotations

from typing import Any

from foveakv.core.budget import Geometry, parse_budget
from foveakv.engines.transformers import compat
from foveakv.engines.transformers.options import CacheOptions
from foveakv.engines.transformers.sizes import head_dim, positions_of
from foveakv.methods import Method

OVERHEAD = 1.25
"""Allowance for positions, fields of slots, digests and slack, measured on all methods (tests/serving)."""
_BITS = {"int8": 8, "int4": 4}
FIXED = 64 * 1024
"""Bytes for what does not grow with the prompt."""


class Sizes:
    """Sizes of a model's caches."""

    def __init__(self, model: Any) -> None:
        config = compat.text_config_of(model)
        layers = compat.default_layers(config)
        self.layers = sum(type(layer) is compat.DynamicLayer for layer in layers)
        self.windows = [int(getattr(each, "sliding_window", 0) or 0) for each in layers]
        self.windows = [w for each, w in zip(layers, self.windows, strict=True) if type(each) is not compat.DynamicLayer]
        self.kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        self.head_dim = head_dim(config)
        self.itemsize = model.dtype.itemsize
        self.positions = positions_of(config)

    def geometry(self, prompt_tokens: int) -> Geometry:
        """The geometry of one prompt's cache."""
        dim = self.head_dim
        return Geometry(1, [prompt_tokens], self.layers, self.kv_heads, dim, dim, self.itemsize)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token without compression, over all compressed layers."""
        return self.geometry(1).token_bytes

    def estimate(self, method: Method, options: CacheOptions, prompt_tokens: int, new_tokens: int) -> int:
        """Upper bound of what one cache stores on the device at the end of a reply.

        A method without a budget counts as a full cache.
        """
        geometry = self.geometry(prompt_tokens)
        budget = getattr(method, "budget", None)
        kept = prompt_tokens if budget is None else int(parse_budget(budget).steady(geometry).max())
        slots = min(kept, prompt_tokens) + new_tokens
        return self._bytes(slots, options) + self._windows(prompt_tokens + new_tokens)

    def growth(self, options: CacheOptions, new_tokens: int) -> int:
        """Upper bound of what further tokens add."""
        return self._bytes(new_tokens, options) - FIXED

    def _bytes(self, slots: int, options: CacheOptions) -> int:
        per_slot = float(self.token_bytes)
        extra = 0.0
        if options.kv_dtype is not None:
            per_slot *= 1.3 * _BITS[options.kv_dtype] / (8 * self.itemsize)  # with scales
            extra = options.residual_length * self.token_bytes
        return int((slots * per_slot + extra) * OVERHEAD) + FIXED

    def _windows(self, tokens: int) -> int:
        """Layers with a sliding window are transformers' own."""
        per_layer = self.token_bytes // max(self.layers, 1)
        return sum(min(window, tokens) if window else tokens for window in self.windows) * per_layer

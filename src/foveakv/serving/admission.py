"""How many bytes a request's caches will take, before it runs."""

from __future__ import annotations

import dataclasses
from typing import Any

from foveakv.core.budget import Geometry, parse_budget
from foveakv.engines.transformers import compat
from foveakv.engines.transformers.options import CacheOptions
from foveakv.engines.transformers.sizes import head_dim, positions_of
from foveakv.methods import Method

SLOT_EXTRA = 16
"""Bytes for the position and the fields of a slot, such as accumulated attention."""
_BITS = {"int8": 8, "int4": 4}
SMALLEST_PAGE = 4
"""Tokens of the smallest page that Quest chooses by itself."""
FIXED = 64 * 1024
"""Bytes for what does not grow with the prompt."""


class Sizes:
    """Sizes of a model's caches."""

    def __init__(self, model: Any) -> None:
        config = compat.text_config_of(model)
        layers = compat.default_layers(config)
        self.layers = sum(type(layer) is compat.DynamicLayer for layer in layers)
        others = [layer for layer in layers if type(layer) is not compat.DynamicLayer]
        self.windows = [int(getattr(layer, "sliding_window", 0) or 0) for layer in others]
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
        """Upper bound of what one cache stores on the device at the end of a reply."""
        kept = prompt_tokens
        if budget_bounds(method):
            budget = parse_budget(getattr(method, "budget", 1.0))
            kept = min(kept, int(budget.steady(self.geometry(prompt_tokens)).max()))
        slots = self._bytes(kept + new_tokens, options)
        if method.retrieves:
            slots += max(slots // 4, self._bounds(method, prompt_tokens))  # digests
        return slots + FIXED + self._windows(prompt_tokens + new_tokens)

    def growth(self, options: CacheOptions, new_tokens: int) -> int:
        """Upper bound of what further tokens add."""
        return self._bytes(new_tokens, options)

    def _bytes(self, slots: int, options: CacheOptions) -> int:
        """Bytes of this number of slots per head, with the spare slots of `foveakv.memory.layout`."""
        slots += 2 * max(8, slots // 16)
        heads = self.layers * self.kv_heads
        per_slot, extra = self.token_bytes / heads, 0.0
        if options.kv_dtype is not None:
            per_slot *= 1.3 * _BITS[options.kv_dtype] / (8 * self.itemsize)  # with scales
            extra = options.residual_length * self.token_bytes
        return int(slots * heads * (per_slot + SLOT_EXTRA) + extra)

    def _bounds(self, method: Method, prompt_tokens: int) -> int:
        """Bytes of the bounds of all pages, in the model's dtype whatever slots are stored in; 0 without pages."""
        pages = getattr(method, "page_size", 0)
        size = pages if isinstance(pages, int) else SMALLEST_PAGE
        return -(-prompt_tokens * self.token_bytes // size) if size else 0

    def _windows(self, tokens: int) -> int:
        """Layers with a sliding window are transformers' own."""
        per_layer = self.token_bytes // max(self.layers, 1)
        return sum(min(window, tokens) if window else tokens for window in self.windows) * per_layer


def budget_bounds(method: Method) -> bool:
    """Whether a method's budget bounds what is stored on the device.

    Methods that evict visual tokens only keep all text in addition, and methods that retrieve without a backing store
    (Quest) keep every token.
    """
    names = {field.name for field in dataclasses.fields(method)}
    if getattr(method, "budget", None) is None or method.visual_only:
        return False
    return not method.retrieves or "store" in names

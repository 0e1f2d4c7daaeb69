"""The attention functions that transformers calls while a model is attached.

For every base implementation (sdpa, eager, flash_attention_2, ...) there is one of ours, `foveakv_<base>`. Dense
attention (prefill, and layers that are not compressed) goes to the base with exactly the mask it expects; attention
over stored slots goes to `CompressedLayer.attend`.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from foveakv.engines.transformers import compat
from foveakv.engines.transformers.handle import KVHandle
from foveakv.engines.transformers.masks import LazyMask, as_mask
from foveakv.errors import UnsupportedModelError

PREFIX = "foveakv_"
# Arguments that change the attention's arithmetic in ways that the decode kernels do not implement.
_FOREIGN = ("softcap", "s_aux", "position_bias")


def implementation(base: str) -> str:
    """Registers (once) and names our implementation on top of `base`."""
    name = PREFIX + base
    if name not in compat.ALL_ATTENTION_FUNCTIONS:
        compat.register_attention(name, _attention(base), _mask(base))
    return name


def _mask(base: str) -> Any:
    def lazy_mask(**arguments: Any) -> LazyMask:
        return LazyMask(base, arguments)

    return lazy_mask


def _attention(base: str) -> Any:
    def attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor | KVHandle,
        value: Tensor | KVHandle,
        attention_mask: Any,
        scaling: float | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        mask = as_mask(attention_mask)
        if not isinstance(key, KVHandle):
            dense = None if mask is None else mask.dense()
            return compat.base_attention(base, module)(module, query, key, value, dense, scaling=scaling, **kwargs)
        for name in _FOREIGN:
            if kwargs.get(name) is not None:
                raise UnsupportedModelError(
                    f"{type(module).__name__} uses `{name}` in its attention, which is not supported"
                )
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        layer = key.layer
        if key.keys is None:
            return layer.attend(query, mask, scale), None
        dense = None if mask is None else mask.dense()
        keys, values = key.keys, key.values
        output = compat.base_attention(base, module)(module, query, keys, values, dense, scaling=scaling, **kwargs)
        layer.end_prefill(query, key, mask, scale)
        return output

    return attention

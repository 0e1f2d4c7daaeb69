"""The attention functions that transformers calls while a model is attached.

For every base implementation (sdpa, eager, flash_attention_2, ...) one named `foveakv_<base>` is registered with
transformers. Dense attention (prefill, and layers that are not compressed) is passed to the base with exactly the mask
that it expects; attention over stored slots is computed by `CompressedLayer.attend`.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor, nn

from foveakv.engines.transformers import compat
from foveakv.engines.transformers.handle import PREFIX, KVHandle
from foveakv.engines.transformers.masks import LazyMask, as_mask
from foveakv.errors import UnsupportedModelError

# Arguments that change the attention's arithmetic in ways that the decode kernels do not implement.
_FOREIGN = ("softcap", "s_aux", "position_bias")


class Implementation(str):
    """The name `foveakv_<base>` of an attention implementation, of which every copy is the plain `<base>`.

    A config with this name that is deep-copied, pickled or saved belongs to a model that is not attached.
    """

    __slots__ = ()

    def __reduce_ex__(self, protocol: Any) -> tuple[type[str], tuple[str]]:
        return str, (self.removeprefix(PREFIX),)


def implementation(base: str) -> Implementation:
    """Registers the implementation on top of `base` with transformers (once), and returns its name."""
    name = Implementation(PREFIX + base)
    if name not in compat.ALL_ATTENTION_FUNCTIONS:
        compat.register_attention(str(name), _attention(base), _mask(base))
    return name


class _Thread(threading.local):
    """What the mask functions need to know of the calling thread. lazy: whether it is in a compressed call."""

    lazy = False


thread = _Thread()


def _mask(base: str) -> Any:
    """The mask function that goes with the implementation on top of `base`.

    In a compressed call it keeps the description of the mask. In other calls, which run in other threads while a model
    is attached, it builds the base's own mask: the model may be detached before such a pass has reached its attention.
    """

    def mask(**arguments: Any) -> Any:
        if thread.lazy or torch.compiler.is_compiling():
            return LazyMask(base, arguments)
        build = compat.base_mask(base)
        return None if build is None else build(**arguments)

    return mask


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

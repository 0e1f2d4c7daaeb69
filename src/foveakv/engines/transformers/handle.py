"""What a compressed layer gives to the model in place of key and value tensors."""

from __future__ import annotations

from typing import Any, NoReturn

from torch import Tensor

from foveakv.engines.transformers import compat
from foveakv.engines.transformers.contract import Attending
from foveakv.errors import CacheInUseError, UnsupportedModelError

PREFIX = "foveakv_"
"""How the names of attention functions that take handles begin."""


class KVHandle:
    """Opaque stand-in for key and value tensors, passed from `cache.update` to the attention function.

    keys, values: the dense tensors [B, H, C, D] and [B, H, C, Dv] while a prompt is read; None while decoding (the
    layer holds the slots). Whatever else reads a handle as if it were a tensor gets an error: the attention would not
    be that over the stored slots.
    """

    def __init__(self, layer: Attending, keys: Tensor | None = None, values: Tensor | None = None) -> None:
        self.layer = layer
        self.keys = keys
        self.values = values

    def release(self) -> None:
        """Drops the dense tensors; the model's frames may keep the handle for longer."""
        self.keys = self.values = None

    def refuse(self, what: str) -> NoReturn:
        """Raises for a handle that was read. what: the attribute, operator or torch function that read it."""
        owner = self.layer.cache.owner
        model = None if owner is None else owner()
        if model is not None and str(compat.text_config_of(model)._attn_implementation).startswith(PREFIX):
            raise UnsupportedModelError(
                f"{type(model).__name__} is not supported: the attention of layer {self.layer.layer_idx} computes with "
                f"the keys and values that its cache returns ({what}) instead of passing them on to transformers' "
                "AttentionInterface"
            )
        raise CacheInUseError(
            "a compressed cache was passed to an attention function that is not FoveaKV's: use it inside the block "
            "`with foveakv.compress(...)` it came from, or make it with `foveakv.cache_for(model, method)` and leave "
            "the model's attention implementation alone"
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # Python itself asks for these, to copy or to compare
            raise AttributeError(name)
        self.refuse(name)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        todo = [*args, *(kwargs or {}).values()]
        for item in todo:
            if isinstance(item, (list, tuple)):
                todo += item
            if isinstance(item, KVHandle):
                item.refuse(getattr(function, "__name__", str(function)))
        raise NotImplementedError(str(function))


def _operator(name: str) -> Any:
    def refuse(self: KVHandle, *unused: Any) -> NoReturn:
        self.refuse(name.strip("_"))

    return refuse


# Operators are looked up on the type, past `__getattr__`.
for _name in ("add", "sub", "mul", "truediv", "matmul", "pow"):
    for _operation in (f"__{_name}__", f"__r{_name}__"):
        setattr(KVHandle, _operation, _operator(_operation))
for _operation in ("__getitem__", "__setitem__", "__len__", "__iter__", "__neg__", "__bool__"):
    setattr(KVHandle, _operation, _operator(_operation))

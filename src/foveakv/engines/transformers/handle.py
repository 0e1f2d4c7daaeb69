"""What a compressed layer gives to the model in place of key and value tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from torch import Tensor

from foveakv.errors import CacheInUseError

if TYPE_CHECKING:
    from foveakv.engines.transformers.layer import CompressedLayer


class KVHandle:
    """Passes through the model's code unread, from `cache.update` to our attention function.

    `keys` and `values` are the dense tensors during prefill, and None while decoding (the layer holds the slots).
    """

    def __init__(self, layer: CompressedLayer, keys: Tensor | None = None, values: Tensor | None = None) -> None:
        self.layer = layer
        self.keys = keys
        self.values = values

    def release(self) -> None:
        """Drops the dense tensors; the model's frames may hold on to the handle for longer."""
        self.keys = self.values = None

    def __getattr__(self, name: str) -> Any:
        # Reached only for attributes that a tensor would have: some other attention function got the handle.
        if name.startswith("__"):
            raise AttributeError(name)
        _refuse()


def _refuse() -> NoReturn:
    raise CacheInUseError(
        "a compressed cache met an attention function that is not FoveaKV's: use it inside the block "
        "`with foveakv.compress(...)` it came from, or make it with `foveakv.cache_for(model, method)` and leave the "
        "model's attention implementation alone"
    )

"""Copies of an attached model: plain models, whether made by `copy.deepcopy`, `pickle` or `torch.save`.

All three ask the object itself for its state, through `__reduce_ex__`. The attribute that is set here gives the state
without the wrappers. The attention implementation in the config needs no such care: it is a string that is copied as
the name of the base implementation, see `attention.Implementation`.
"""

from __future__ import annotations

from typing import Any

from foveakv.engines.transformers.attachment import Original
from foveakv.errors import UnsupportedModeError


def wrap_reduce(original: Original, model: Any) -> Any:
    """`model.__reduce_ex__` while it is attached."""

    def reduce(protocol: int) -> Any:
        reduced = original(protocol)
        if not isinstance(reduced, tuple) or len(reduced) < 3 or not isinstance(reduced[2], dict):
            raise UnsupportedModeError(
                f"a {type(original.model).__name__} cannot be copied or pickled while it is attached; do it before the "
                "compress() block, or after it"
            )
        return *reduced[:2], original.attachment.plain_attributes(reduced[2]), *reduced[3:]

    return reduce

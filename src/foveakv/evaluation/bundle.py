"""Several one-sequence caches, each with a method of its own, that a model runs as one batch.

A decode step of a small batch reads all weights for few numbers; with many methods on one prompt the weights are read
once for all of them. Linear layers see a batch; attention runs row by row, over each cache's own memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor

from foveakv.core.prompt import PromptMap
from foveakv.engines.transformers import compat
from foveakv.engines.transformers.blocks import Reads
from foveakv.engines.transformers.cache import CompressedCache
from foveakv.engines.transformers.handle import KVHandle
from foveakv.engines.transformers.layer import CompressedLayer
from foveakv.engines.transformers.masks import Mask


def fits(cache: CompressedCache) -> bool:
    """Whether a cache can be a row: its prompt is in, all of its layers are compressed, and positions are counted from
    what it has seen alone (M-RoPE models keep offsets per prompt)."""
    whole = len(cache.compressed) == len(cache.layers)
    return (
        whole and cache.prefilled and cache.preallocated is None and all(state is None for state in cache.model_state)
    )


class Bundle(compat.Cache):
    """Caches of one sequence each that have seen equally many tokens, as rows of a batch, for one forward pass.

    New tokens are plainly causal and without padding, as recorded prompts are (`replay.py`).
    """

    def __init__(self, caches: Sequence[CompressedCache]) -> None:
        super().__init__(layers=[_Rows(list(rows)) for rows in zip(*(cache.layers for cache in caches), strict=True)])
        self.caches = list(caches)

    @contextmanager
    def step(self, new: int) -> Iterator[None]:
        """Around a forward pass over `new` tokens of text in each row, a turn if there are several, as in `model(...)`.

        Recorded times are those of the whole batch.
        """
        for cache in self.caches:
            block = Reads("turn", None, cache.seen) if new > 1 else None
            text = cache.full_prompt.kinds.new_zeros(1, new)
            cache.begin_forward(new, PromptMap(text), None, cache.geometry.itemsize, batch=1, block=block)
        yield
        for cache in self.caches:
            cache.end_forward(cache.model_state)


class _Rows(compat.CacheLayerMixin):
    """One layer of all rows."""

    is_compileable = False
    is_sliding = False

    def __init__(self, rows: list[CompressedLayer]) -> None:
        super().__init__()
        self.rows = rows
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        pass

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[KVHandle, KVHandle]:
        for row, keys, values in zip(self.rows, key_states.split(1), value_states.split(1), strict=True):
            row.update(keys, values)
        handle = KVHandle(cast(CompressedLayer, self))
        return handle, handle

    def attend(self, query: Tensor, mask: Mask | None, scaling: float) -> Tensor:
        """As `CompressedLayer.attend`, a row at a time; the mask is plainly causal for each of them."""
        return torch.cat([row.attend(own, None, scaling) for row, own in zip(self.rows, query.split(1), strict=True)])

    def get_seq_length(self) -> int:
        return self.rows[0].get_seq_length()

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.rows[0].get_mask_sizes(query_length)

    def get_max_length(self) -> int:
        return -1

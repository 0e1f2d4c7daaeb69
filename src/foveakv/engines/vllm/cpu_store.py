"""The paged cache of vLLM's CPU attention backend.

The backend's kernels permute the keys and values inside a block, differently for each instruction set. The permutation
is not part of any interface; it is found by writing numbers with vLLM's own operation and reading them back.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from vllm import _custom_ops as ops
from vllm.model_executor.models.utils import extract_layer_index

from foveakv.engines.vllm.stored import products
from foveakv.errors import UnsupportedModeError


class CPUStore:
    """See `stored.PagedStore`. A layer's cache is [blocks, H, size, 2 * D]: a block's keys, then its values."""

    def __init__(self, layers: Mapping[str, Any], caches: Mapping[str, Tensor], size: int) -> None:
        """Take over the caches of all layers.

        layers: vLLM's attention layers by name. caches: their caches. size: slots per block.

        Raises:
            UnsupportedModeError: the caches are not laid out as those of the tested versions.
        """
        self.size = size
        self.names = sorted(caches, key=extract_layer_index)
        self.index: Mapping[str, int] = {name: idx for idx, name in enumerate(self.names)}
        self._layers = [layers[name] for name in self.names]
        self._caches = [caches[name] for name in self.names]
        self.heads = int(self._caches[0].shape[1])
        for cache in self._caches:
            if cache.dim() != 4 or cache.shape[2] != size or cache.shape[3] % 2:
                raise UnsupportedModeError(f"the KV cache of vLLM has shape {tuple(cache.shape)}; see docs/vllm.md")

    def read(self, idx: int, blocks: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
        """Copy keys and values of the first `tokens` slots of consecutive blocks: [tokens, H, D] each."""
        keys, values = _halves(self._caches[idx])
        key_places, value_places = self._places(idx)
        return self._rows(keys, key_places, blocks, tokens), self._rows(values, value_places, blocks, tokens)

    def keys(self, idx: int, blocks: Tensor, tokens: int) -> Tensor:
        """Copy the keys only: [tokens, H, D]."""
        return self._rows(_halves(self._caches[idx])[0], self._places(idx)[0], blocks, tokens)

    def dot(self, idx: int, blocks: Tensor, tokens: int, query: Tensor) -> Tensor:
        """Return q . k: [q, Hq, D] -> [Hq, q, tokens], float32. Known layouts are read in place."""
        keys, group = _halves(self._caches[idx])[0], self._group(idx)
        if group is None:
            return products(query, self.keys(idx, blocks, tokens))
        heads, dim, rows = keys.shape[1], keys.shape[3], query.shape[0]
        blocks = blocks[: -(-tokens // self.size)].long()
        grouped = query.float().unflatten(1, (heads, -1)).permute(1, 2, 0, 3).flatten(1, 2)  # [H, G * q, D]
        taken = keys[blocks].float().view(-1, heads, self.size // group, dim, group)
        found = grouped[None, :, None] @ taken  # [n, H, size / group, G * q, group]
        return found.permute(1, 3, 0, 2, 4).flatten(2)[..., :tokens].unflatten(1, (-1, rows)).flatten(0, 1)

    def move(self, idx: int, source: Tensor, target: Tensor) -> None:
        """Copy keys and values from slots to slots, int64 [n] each."""
        if not source.shape[0]:
            return
        for part, place in zip(_halves(self._caches[idx]), self._places(idx), strict=True):
            flat, places = part.view(*part.shape[:2], -1), place.view(self.size, -1)
            taken = flat[(source // self.size)[:, None], :, places[source % self.size]]  # [n, D, H]
            flat[(target // self.size)[:, None], :, places[target % self.size]] = taken

    def _places(self, idx: int) -> tuple[Tensor, Tensor]:
        cache = self._caches[idx]
        return _places(self.size, cache.shape[3] // 2, cache.dtype, self._layers[idx].isa)

    def _group(self, idx: int) -> int | None:
        cache = self._caches[idx]
        return _transposed_group(self.size, cache.shape[3] // 2, cache.dtype, self._layers[idx].isa)

    def _rows(self, part: Tensor, place: Tensor, blocks: Tensor, tokens: int) -> Tensor:
        blocks = blocks[: -(-tokens // self.size)].long()
        taken = part[blocks].flatten(2)[:, :, place]  # [n, H, size * D]
        return taken.unflatten(2, (self.size, part.shape[3])).transpose(1, 2).flatten(0, 1)[:tokens]


def _halves(cache: Tensor) -> tuple[Tensor, Tensor]:
    """[blocks, H, size, 2 * D] -> keys and values, [blocks, H, size, D] each, as the kernels see them."""
    blocks, heads, size, dims = cache.shape
    keys, values = cache.view(blocks, heads, size * 2, dims // 2).chunk(2, dim=2)
    return keys, values


def _write(cache: Tensor, keys: Tensor, values: Tensor, slots: Tensor, isa: str) -> None:
    key_cache, value_cache = _halves(cache)
    ops.cpu_attn_reshape_and_cache(keys.contiguous(), values.contiguous(), key_cache, value_cache, slots, isa)


@functools.cache
def _places(size: int, dim: int, dtype: torch.dtype, isa: str) -> tuple[Tensor, Tensor]:
    """Return where the block of one head holds (slot, channel): int64 [size * dim], for keys and for values.

    Raises:
        UnsupportedModeError: the layout is not a permutation.
    """
    number = torch.arange(size * dim)
    found = [torch.zeros(size * dim, dtype=torch.int64) for _ in range(2)]
    base, factor = 256, 1  # the largest base whose digits every dtype represents exactly
    while factor < size * dim:
        digits = (number // factor % base).to(dtype).view(size, 1, dim)
        cache = torch.zeros(1, 1, size, 2 * dim, dtype=dtype)
        _write(cache, digits, digits, torch.arange(size), isa)
        for total, part in zip(found, _halves(cache), strict=True):
            total += part.flatten().long() * factor
        factor *= base
    for each in found:
        if not torch.equal(each.sort().values, number):
            raise UnsupportedModeError(f"the {dtype} layout of vLLM's CPU cache ({isa}) is unknown; see docs/vllm.md")
    return found[0].argsort(), found[1].argsort()


@functools.cache
def _transposed_group(size: int, dim: int, dtype: torch.dtype, isa: str) -> int | None:
    """Return g if the keys of each g consecutive slots are stored as [dim, g]; None if the layout is another one."""
    place = _places(size, dim, dtype, isa)[0]
    slot, channel = torch.arange(size)[:, None], torch.arange(dim)
    for group in (32, 16, 64, size, 1):
        if size % group == 0 and place.equal((slot // group * group * dim + channel * group + slot % group).flatten()):
            return group
    return None

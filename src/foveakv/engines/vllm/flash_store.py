"""The paged cache of vLLM's FlashAttention backend. Nothing here imports vLLM."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from foveakv.engines.vllm.stored import products
from foveakv.errors import UnsupportedModeError


class FlashStore:
    """See `stored.PagedStore`. A layer's cache is [blocks, H, size, 2 * D] of any strides: keys, then values of a slot.

    The kernel sees it as two tensors [blocks, size, H, D] (`FlashAttentionImpl.forward` in vLLM 0.32). Methods decide
    on the host, so what is read is copied there.
    """

    def __init__(self, caches: Mapping[str, Tensor], size: int) -> None:
        """Take over the caches of all layers.

        caches: by the names of the layers, in the order of the layers. size: slots per block.

        Raises:
            UnsupportedModeError: the caches are not laid out as those of the tested versions.
        """
        self.size = size
        self.index: Mapping[str, int] = {name: idx for idx, name in enumerate(caches)}
        self._caches = list(caches.values())
        self.heads = int(self._caches[0].shape[1])
        for cache in self._caches:
            if cache.dim() != 4 or cache.shape[2] != size or cache.shape[3] % 2 or not cache.is_floating_point():
                raise UnsupportedModeError(
                    f"the KV cache of vLLM has shape {tuple(cache.shape)} and type {cache.dtype}; see docs/vllm.md"
                )

    def read(self, idx: int, blocks: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
        """Copy keys and values of the first `tokens` slots of consecutive blocks to the host: [tokens, H, D] each."""
        keys, values = self._rows(self._caches[idx], blocks, tokens).cpu().chunk(2, dim=-1)
        return keys.contiguous(), values.contiguous()

    def keys(self, idx: int, blocks: Tensor, tokens: int) -> Tensor:
        """Copy the keys only: [tokens, H, D]."""
        return self._keys(idx, blocks, tokens).cpu()

    def dot(self, idx: int, blocks: Tensor, tokens: int, query: Tensor) -> Tensor:
        """Return q . k, computed on the device of the cache: [q, Hq, D] -> [Hq, q, tokens], float32 on the host."""
        return products(query.to(self._caches[idx].device), self._keys(idx, blocks, tokens)).cpu()

    def move(self, idx: int, source: Tensor, target: Tensor) -> None:
        """Copy keys and values from slots to slots, int64 [n] each; all are read before any is written."""
        cache = self._caches[idx]
        source, target = source.to(cache.device), target.to(cache.device)
        cache[target // self.size, :, target % self.size] = cache[source // self.size, :, source % self.size]

    def _keys(self, idx: int, blocks: Tensor, tokens: int) -> Tensor:
        cache = self._caches[idx]
        return self._rows(cache[..., : cache.shape[3] // 2], blocks, tokens)

    def _rows(self, cache: Tensor, blocks: Tensor, tokens: int) -> Tensor:
        blocks = blocks[: -(-tokens // self.size)].to(cache.device).long()
        return cache[blocks].transpose(1, 2).flatten(0, 1)[:tokens]

"""The plugin's FlashAttention backend on the CPU: its two CUDA operations are replaced by slow ones in PyTorch.

So vLLM's and the plugin's Python code runs as on CUDA: metadata, slots, layouts, which rows are kept and replayed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from vllm.v1.attention import selector
from vllm.v1.attention.backends import flash_attn
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from foveakv.engines.vllm import flash_backend, private


class Impl(flash_backend.Impl):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.vllm_flash_attn_version = 2


class Backend(flash_backend.Backend):
    @staticmethod
    def get_impl_cls() -> type[Impl]:
        return Impl


def store(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor, *scales: Any
) -> None:  # caches: [blocks, size, H, D]
    used = slots >= 0
    block, place = slots[used] // key_cache.shape[1], slots[used] % key_cache.shape[1]
    key_cache[block, place], value_cache[block, place] = key[: len(slots)][used], value[: len(slots)][used]


def attend(*, q: Tensor, k: Tensor, v: Tensor, out: Tensor, **given: Any) -> None:
    """Causal attention to paged keys: q [tokens, Hq, D], k and v [blocks, size, H, D]."""
    assert given["causal"]
    starts, lengths, tables = given["cu_seqlens_q"].tolist(), given["seqused_k"].tolist(), given["block_table"].long()
    for i, length in enumerate(lengths):
        rows = q[starts[i] : starts[i + 1]].transpose(0, 1)
        new = rows.shape[1]
        if new == 0:
            continue
        keys, values = (
            part[tables[i, : -(-length // k.shape[1])]].flatten(0, 1)[:length].transpose(0, 1) for part in (k, v)
        )
        seen = torch.arange(length) <= torch.arange(length - new, length)[:, None]
        found = torch.nn.functional.scaled_dot_product_attention(
            rows[None], keys[None], values[None], seen, scale=given["softmax_scale"], enable_gqa=True
        )
        out[starts[i] : starts[i + 1]] = found[0].transpose(0, 1)


@contextmanager
def flash_on_cpu() -> Iterator[None]:
    """Engines that are made inside the block run on the FlashAttention backend."""
    selector._cached_get_attn_backend.cache_clear()
    register_backend(AttentionBackendEnum.CPU_ATTN, f"{__name__}.Backend")
    try:
        with (
            mock.patch.object(flash_attn, "reshape_and_cache_flash", store, create=True),
            mock.patch.object(flash_attn, "_FA4_DENSE_ATTENTION_KERNEL", attend),
            mock.patch.object(private, "register_backends"),
        ):
            yield
    finally:
        selector._cached_get_attn_backend.cache_clear()
        private.register_backends()

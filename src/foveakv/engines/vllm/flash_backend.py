"""vLLM's FlashAttention backend on CUDA, which also reads compressed requests. Unverified: no GPU has run it.

Written from the source of vLLM 0.32. Differences from the CPU backend: keys and values are written by an operation of
its own before attention, by the slots that the builder changes in place; and graphs of whole steps would read tables
and lengths from fixed addresses, so they are refused.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadataBuilder,
)

from foveakv.engines.vllm.rewriting import ObservingImpl, RewritingBuilder, active_worker
from foveakv.engines.vllm.settings import CONNECTOR
from foveakv.errors import UnsupportedModeError


class Builder(RewritingBuilder, FlashAttentionMetadataBuilder):
    """Presents compressed requests to the kernel by their stored tokens."""

    supports_update_block_table: bool = False

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        """Return that full graphs are not supported, by which vLLM captures piecewise ones, with attention outside."""
        transfer = vllm_config.kv_transfer_config
        if transfer is not None and transfer.kv_connector == CONNECTOR:
            return AttentionCGSupport.NEVER
        return super().get_cudagraph_support(vllm_config, kv_cache_spec)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        """See `RewritingBuilder`."""
        if active_worker() is not None and self.compilation_config.cudagraph_mode.has_full_cudagraphs():
            raise UnsupportedModeError(
                "FoveaKV in vLLM does not support full CUDA graphs; set cudagraph_mode=PIECEWISE in compilation_config"
            )
        return super().build(common_prefix_len, common_attn_metadata, fast_build)


class Impl(ObservingImpl, FlashAttentionImpl):
    """Keeps the query rows that methods observe."""


class Backend(FlashAttentionBackend):
    """Takes the place of vLLM's FlashAttention backend."""

    @staticmethod
    def get_impl_cls() -> type[Impl]:
        """Return the attention implementation."""
        return Impl

    @staticmethod
    def get_builder_cls() -> type[Builder]:
        """Return the builder of the metadata."""
        return Builder

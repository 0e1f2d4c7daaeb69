"""vLLM's CPU attention backend, which also reads compressed requests."""

from __future__ import annotations

from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadataBuilder,
)

from foveakv.engines.vllm.rewriting import ObservingImpl, RewritingBuilder


class Builder(RewritingBuilder, CPUAttentionMetadataBuilder):
    """Presents compressed requests to the kernel by their stored tokens."""


class Impl(ObservingImpl, CPUAttentionBackendImpl):
    """Keeps the query rows that methods observe."""


class Backend(CPUAttentionBackend):
    """Takes the place of vLLM's CPU backend."""

    @staticmethod
    def get_impl_cls() -> type[Impl]:
        """Return the attention implementation."""
        return Impl

    @staticmethod
    def get_builder_cls() -> type[Builder]:
        """Return the builder of the metadata."""
        return Builder

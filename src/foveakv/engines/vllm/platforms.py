"""The platforms of the plugin: vLLM's CPU backend, and FlashAttention on CUDA, which no GPU has verified yet."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from foveakv.engines.vllm.stored import PagedStore
from foveakv.errors import UnsupportedModeError

_log = logging.getLogger("vllm.foveakv")


def register_backends() -> None:
    """Put the plugin's attention backends in the place of vLLM's; without the connector they pass on to those."""
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    if current_platform.is_cpu():
        register_backend(AttentionBackendEnum.CPU_ATTN, "foveakv.engines.vllm.cpu_backend.Backend")
    elif current_platform.is_cuda():
        register_backend(AttentionBackendEnum.FLASH_ATTN, "foveakv.engines.vllm.flash_backend.Backend")


def check_platform(config: Any, allow_unverified: bool) -> None:
    """Check the platform of a `VllmConfig`.

    Raises:
        UnsupportedModeError: the plugin does not run there, or has not been verified there and nobody asked for it.
    """
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        return
    if not current_platform.is_cuda():
        raise UnsupportedModeError(
            f"FoveaKV in vLLM does not support {current_platform.device_name!r}; it supports the CPU backend, and CUDA "
            "unverified. Use the transformers engine on this device"
        )
    if not allow_unverified:
        raise UnsupportedModeError(
            "FoveaKV in vLLM has not been run on CUDA yet; only the tensor layouts of its FlashAttention backend are "
            'tested. Use the transformers engine, or try it with "allow_unverified": true in kv_connector_extra_config'
        )
    if config.scheduler_config.async_scheduling:
        raise UnsupportedModeError(
            "FoveaKV in vLLM does not support asynchronous scheduling on CUDA; pass async_scheduling=False "
            "(--no-async-scheduling)"
        )
    _log.warning("FoveaKV: the FlashAttention backend has not been verified on a GPU; check its answers")


def store_of(layers: Mapping[str, Any], caches: Mapping[str, Tensor], size: int) -> PagedStore:
    """Return the store of the attention backend that the layers run on.

    Args:
        layers: vLLM's attention layers by name.
        caches: their caches.
        size: slots per block.

    Raises:
        UnsupportedModeError: it is not one of the plugin's, or the caches are not laid out as in the tested versions.
    """
    from vllm.model_executor.models.utils import extract_layer_index

    from foveakv.engines.vllm import cpu_backend, flash_backend
    from foveakv.engines.vllm.cpu_store import CPUStore
    from foveakv.engines.vllm.flash_store import FlashStore

    found = {type(each.impl) for each in layers.values()}
    if all(issubclass(each, cpu_backend.Impl) for each in found):
        return CPUStore(layers, caches, size)
    if all(issubclass(each, flash_backend.Impl) for each in found):
        return FlashStore({name: caches[name] for name in sorted(caches, key=extract_layer_index)}, size)
    names = ", ".join(sorted(each.__name__ for each in found))
    raise UnsupportedModeError(
        f"the model's attention runs on {names} instead of the plugin's backend; on CUDA choose "
        "attention_backend=FLASH_ATTN, and install foveakv with pip so that vLLM finds its entry point"
    )

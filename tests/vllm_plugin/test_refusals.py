"""Configurations of vLLM that the plugin does not support are errors at start, and so are invalid settings."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import engines
import pytest
import tiny_checkpoints
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec

from foveakv.engines.vllm import private, support
from foveakv.errors import FoveaKVError, UnsupportedModeError, UnsupportedModelError

OFF = engines.transfer_config("off")
SIZES: dict[str, Any] = {"block_size": 32, "num_kv_heads": 4, "head_size": 32, "dtype": torch.float32}


def config(**changed: Any) -> Any:
    """What the plugin reads of a `VllmConfig`; keys are paths such as "cache_config.cache_dtype"."""
    made = SimpleNamespace(
        parallel_config=SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1, data_parallel_size=1),
        cache_config=SimpleNamespace(enable_prefix_caching=False, cache_dtype="auto"),
        model_config=SimpleNamespace(get_total_num_kv_heads=lambda: 4, model="tiny"),
        kv_transfer_config=SimpleNamespace(kv_load_failure_policy="fail"),
        speculative_config=None, lora_config=None, use_v2_model_runner=False,
    )  # fmt: skip
    for path, value in changed.items():
        part, _, name = path.rpartition("__")
        setattr(getattr(made, part) if part else made, name, value)
    return made


def caches(*specs: Any) -> Any:
    return SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec, layer_names=["a"]) for spec in specs])


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"cache_config__enable_prefix_caching": True}, "enable_prefix_caching=False"),
        ({"cache_config__cache_dtype": "fp8_e4m3"}, "kv_cache_dtype"),
        ({"speculative_config": object()}, "speculative"),
        ({"lora_config": object()}, "LoRA"),
        ({"parallel_config__pipeline_parallel_size": 2}, "pipeline"),
        ({"parallel_config__data_parallel_size": 2}, "data parallelism"),
        ({"parallel_config__decode_context_parallel_size": 2}, "context parallelism"),
        ({"parallel_config__tensor_parallel_size": 8}, "tensor_parallel_size=4"),
        ({"kv_transfer_config__kv_load_failure_policy": "recompute"}, "kv_load_failure_policy"),
        ({"use_v2_model_runner": True}, "VLLM_USE_V2_MODEL_RUNNER"),
        ({"model_config__is_mm_prefix_lm": True}, "both directions"),
    ],
)
def test_configurations_are_refused_with_the_option(changed: dict[str, Any], message: str) -> None:
    full = caches(FullAttentionSpec(**SIZES))
    support.check_config(config(), full)
    with pytest.raises((UnsupportedModeError, UnsupportedModelError), match=message):
        support.check_config(config(**changed), full)


@pytest.mark.parametrize(
    "specs",
    [
        [],
        [FullAttentionSpec(**SIZES)] * 2,
        [FullAttentionSpec(**SIZES, sliding_window=64)],
        [SlidingWindowSpec(**SIZES, sliding_window=64)],
        [MLAAttentionSpec(**{**SIZES, "num_kv_heads": 1})],
    ],
)
def test_models_without_plain_full_attention_are_refused(specs: list[Any]) -> None:
    with pytest.raises(UnsupportedModelError):
        support.check_config(config(), caches(*specs))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"sliding_window": 64}, "sliding windows"),
        ({"alibi_slopes": torch.ones(4)}, "ALiBi"),
        ({"logits_soft_cap": 30.0}, "soft cap"),
        ({"kv_sharing_target_layer_name": "b"}, "share"),
        ({"scale": 0.25}, "one scaling factor"),
    ],
)
def test_layers_are_refused_with_the_reason(changed: dict[str, Any], message: str) -> None:
    plain = {"sliding_window": -1, "alibi_slopes": None, "logits_soft_cap": 0, "kv_sharing_target_layer_name": None}

    def layer(**more: Any) -> Any:
        return SimpleNamespace(layer_name="a", impl=SimpleNamespace(**{**plain, "scale": 0.5, **more}))

    assert support.check_layers([layer(), layer()]) == 0.5
    with pytest.raises(UnsupportedModelError, match=message):
        support.check_layers([layer(), layer(**changed)])


def test_versions() -> None:
    assert private.tested(private.version())
    assert private.tested("0.32.1+cpu")
    assert not private.tested("0.33.0")
    private.check()
    private.register()
    private.register()


MULTI = {
    "kv_connector": "MultiConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"connectors": [engines.transfer_config("random")]},
}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"kv_transfer_config": OFF, "enable_prefix_caching": True}, "enable_prefix_caching=False"),
        ({"kv_transfer_config": engines.transfer_config("snapkv")}, "one block table"),
        ({"kv_transfer_config": MULTI}, "MultiConnector"),
    ],
)
def test_refused_at_start(checkpoints: Path, given: dict[str, Any], message: str) -> None:
    path = tiny_checkpoints.checkpoint("tiny-llava", checkpoints)
    with pytest.raises(FoveaKVError, match=message), engines.engine(path, None, **given):
        pass
    engines.clean()

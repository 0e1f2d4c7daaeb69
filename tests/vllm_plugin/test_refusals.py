"""Configurations of vLLM that the plugin does not support are errors at start, and so are invalid settings."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import engines
import pytest
import tiny_checkpoints
import torch
import vllm.platforms
from vllm.config.cache import CacheDType
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec

from foveakv.engines.vllm import platforms, private, support
from foveakv.engines.vllm.settings import CONNECTOR, check_connector
from foveakv.errors import FoveaKVError, UnsupportedModeError, UnsupportedModelError

OFF = engines.transfer_config("off")
SIZES: dict[str, Any] = {"block_size": 32, "num_kv_heads": 4, "head_size": 32, "dtype": torch.float32}


def config(**changed: Any) -> Any:
    """What the plugin reads of a `VllmConfig`; keys are paths such as "cache_config.cache_dtype"."""
    made = SimpleNamespace(
        parallel_config=SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1, data_parallel_size=1),
        cache_config=SimpleNamespace(cache_dtype="auto"),
        scheduler_config=SimpleNamespace(async_scheduling=False),
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
        ({"cache_config__cache_dtype": "fp8_e4m3"}, "kv_cache_dtype 'fp8_e4m3'; use auto"),
        ({"speculative_config": object()}, "speculative"),
        ({"lora_config": object()}, "LoRA"),
        ({"parallel_config__pipeline_parallel_size": 2}, "pipeline"),
        ({"parallel_config__data_parallel_size": 2}, "data parallelism"),
        ({"parallel_config__use_ubatching": True}, "enable_dbo"),
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


@pytest.mark.parametrize("dtype", get_args(CacheDType))
def test_every_cache_of_another_type_is_refused(dtype: str) -> None:
    given, full = config(cache_config__cache_dtype=dtype), caches(FullAttentionSpec(**SIZES))
    if dtype in ("auto", "float16", "bfloat16"):
        support.check_config(given, full)
    else:
        with pytest.raises(UnsupportedModeError, match="kv_cache_dtype"):
            support.check_config(given, full)


class Platform:
    """A platform other than this one."""

    device_name = "tpu"

    def __init__(self, cuda: bool) -> None:
        self.is_cuda, self.is_cpu = (lambda: cuda), (lambda: False)


def test_platforms(monkeypatch: pytest.MonkeyPatch) -> None:
    warned: list[str] = []
    monkeypatch.setattr(platforms._log, "warning", warned.append)
    full = caches(FullAttentionSpec(**SIZES))
    monkeypatch.setattr(vllm.platforms, "current_platform", Platform(cuda=False))
    with pytest.raises(UnsupportedModeError, match="'tpu'"):
        support.check_config(config(), full, allow_unverified=True)
    monkeypatch.setattr(vllm.platforms, "current_platform", Platform(cuda=True))
    with pytest.raises(UnsupportedModeError, match='"allow_unverified": true'):
        support.check_config(config(), full)
    with pytest.raises(UnsupportedModeError, match="no-async-scheduling"):
        support.check_config(config(scheduler_config__async_scheduling=True), full, allow_unverified=True)
    support.check_config(config(), full, allow_unverified=True)
    assert len(warned) == 1
    assert "not been verified on a GPU" in warned[0]


def test_other_attention_backends_are_refused() -> None:
    layer = SimpleNamespace(impl=object())
    with pytest.raises(UnsupportedModeError, match="attention_backend=FLASH_ATTN"):
        platforms.store_of({"layers.0": layer}, {"layers.0": torch.zeros(1, 1, 16, 8)}, 16)


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
        ({"sinks": torch.ones(4)}, "sinks"),
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


@pytest.mark.parametrize("broken", ["version", "register_backends"])
def test_a_vllm_of_another_kind_starts_without_the_plugin(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    warned: list[Any] = []

    def fails() -> None:
        raise AttributeError("renamed")

    monkeypatch.setattr(private, broken, fails)
    monkeypatch.setattr(private._log, "warning", lambda *args: warned.append(args))
    private.register()
    ((text, *values),) = warned
    assert "AttributeError: renamed" in text % tuple(values)


def test_distributions_of_other_names(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    expected = private.version()
    monkeypatch.setattr(importlib.metadata, "version", missing)
    assert private.version().split("+")[0] == expected.split("+")[0]


@pytest.mark.parametrize(
    ("connector", "size", "extra", "refused"),
    [
        (CONNECTOR, None, {"method": "hae"}, False),
        ("OffloadingConnector", 1.0, {"method": "hae"}, True),
        ("LMCacheMPConnector", 1.0, {"method": "hae"}, True),
        ("OffloadingConnector", 1.0, {}, False),
        ("OffloadingConnector", None, {"method": "of theirs"}, False),
    ],
)
def test_replaced_connectors_are_refused(connector: str, size: Any, extra: dict[str, Any], refused: bool) -> None:
    given = config(
        kv_transfer_config__kv_connector=connector, kv_transfer_config__kv_connector_extra_config=extra,
        cache_config__kv_offloading_size=size,
    )  # fmt: skip
    check_connector(config(kv_transfer_config=None))
    if refused:
        with pytest.raises(UnsupportedModeError, match=f"kv_offloading_size.*{connector}"):
            check_connector(given)
    else:
        check_connector(given)


MULTI = {
    "kv_connector": "MultiConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"connectors": [engines.transfer_config("random")]},
}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"kv_transfer_config": OFF, "enable_lora": True}, "leave enable_lora out"),
        ({"kv_transfer_config": {**OFF, "kv_load_failure_policy": "recompute"}}, "kv_load_failure_policy"),
        ({"kv_transfer_config": engines.transfer_config("snapkv")}, "one block table"),
        ({"kv_transfer_config": MULTI}, "MultiConnector"),
        ({"kv_transfer_config": engines.transfer_config("random"), "kv_offloading_size": 0.1}, "kv_offloading_size"),
    ],
)
def test_refused_at_start(checkpoints: Path, given: dict[str, Any], message: str) -> None:
    path = tiny_checkpoints.checkpoint("tiny-llava", checkpoints)
    with pytest.raises(FoveaKVError, match=message), engines.engine(path, None, **given):
        pass
    engines.clean()

"""The FlashAttention backend as far as it can run without a GPU: everything but the CUDA operations."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import engines
import pytest
import tiny_checkpoints
from dropped_reference import Reference, check
from flash_on_cpu import flash_on_cpu
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.flash_attn import FlashAttentionMetadataBuilder

import foveakv
from foveakv.engines.vllm import flash_backend
from foveakv.engines.vllm.flash_store import FlashStore
from foveakv.engines.vllm.settings import CONNECTOR
from foveakv.errors import UnsupportedModeError

NAME = "tiny-qwen2_5-vl"  # with grouped queries
HAE: dict[str, Any] = {"ddes": False, "target_visual_tokens": 0.25, "score_layer": 2}


def check_all(reference: Reference, prompts: list[Any], outputs: list[Any]) -> int:
    """Compare with transformers; returns the number of compressed requests."""
    compressed = 0
    for prompt, output, outcome in zip(prompts, outputs, engines.outcomes(outputs), strict=True):
        tokens, chosen = engines.chosen(output)
        kept = None if outcome is None else outcome.kept
        check(reference.log_probabilities(prompt, kept, tokens), tokens, chosen)
        compressed += outcome is not None and len(outcome.freed) > 0
    return compressed


def test_equal_to_transformers_in_chunks_and_after_preemption(checkpoints: Path) -> None:
    path = tiny_checkpoints.checkpoint(NAME, checkpoints)
    reference = Reference(path)
    prompts = [engines.prompt(NAME, count, seed=i) for i, count in enumerate((1, 3, 0, 2, 3, 2))]
    with flash_on_cpu():
        options = {"num_gpu_blocks_override": 40, "max_num_batched_tokens": 240, "block_size": 16, "max_model_len": 512}
        with engines.engine(path, "hae", HAE, **options) as llm:
            assert isinstance(engines.worker_side().store, FlashStore)
            with engines.counted(engines.scheduler_of(llm)) as counts:
                outputs = engines.generate(llm, prompts, 100)
            assert check_all(reference, prompts, outputs) == 5
            assert counts["preempted"] > 0


def test_eviction_while_decoding(checkpoints: Path) -> None:
    path = tiny_checkpoints.checkpoint(NAME, checkpoints)
    reference = Reference(path)
    options: dict[str, Any] = {"scores": "shared", "score_layer": 2, "budget": 0.4, "recycle_bin_size": 8}
    prompts = [engines.prompt(NAME, count, seed=count) for count in (1, 2)]
    with flash_on_cpu(), engines.engine(path, "hae", options, block_size=16) as llm:
        for prompt, output in zip(prompts, engines.generate(llm, prompts, 60), strict=True):
            cache = foveakv.cache_for(reference.model, foveakv.HAE(**options))
            tokens, chosen = engines.chosen(output)
            check(reference.log_probabilities(prompt, None, tokens, cache), tokens, chosen)
            assert output.kv_transfer_params["foveakv"]["evicted_while_decoding"] > 0


def test_full_graphs_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = SimpleNamespace(kv_transfer_config=SimpleNamespace(kv_connector=CONNECTOR))
    without = SimpleNamespace(kv_transfer_config=None)
    support = flash_backend.Builder.get_cudagraph_support
    assert support(ours, None) is AttentionCGSupport.NEVER
    assert support(without, None) is FlashAttentionMetadataBuilder.get_cudagraph_support(without, None)
    monkeypatch.setattr(flash_backend, "active_worker", object)
    builder = object.__new__(flash_backend.Builder)
    builder.compilation_config = SimpleNamespace(cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE)
    with pytest.raises(UnsupportedModeError, match="cudagraph_mode=PIECEWISE"):
        builder.build(0, None)


def test_vllm_sees_the_backend_as_its_own() -> None:
    assert flash_backend.Backend.get_name() == "FLASH_ATTN"
    assert flash_backend.Backend.get_impl_cls() is flash_backend.Impl
    assert flash_backend.Backend.get_builder_cls() is flash_backend.Builder

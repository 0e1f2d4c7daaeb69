"""Two tensor-parallel ranks, each a process with half of the heads, keep the tokens that one rank keeps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import engines
import pytest
import tiny_checkpoints
from dropped_reference import Reference, check
from vllm import SamplingParams

import foveakv
from foveakv.methods import get

SHARED = {"scores": "shared", "score_layer": 2}
CHOICES: list[dict[str, Any]] = [
    {"method": "hae", "options": {"ddes": False, "target_visual_tokens": 0.25, "score_layer": "1,3"}},
    {"method": "hae", "options": {**SHARED, "budget": 0.4, "recycle_bin_size": 8}},
    {"method": "streaming", "options": {"budget": 50}},
    {"method": "random", "options": {"budget": 0.3}},
]


def kept_tokens(worker: Any) -> list[tuple[str, list[int]]]:
    """Runs in a worker: the prompt tokens that its rank kept, by request."""
    from foveakv.engines.vllm.rewriting import active_worker

    return [(each.req_id.rsplit("-", 1)[0], each.kept) for each in active_worker().recent]  # type: ignore[union-attr]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tiny-qwen2_5-vl"])
def test_two_ranks_equal_one(checkpoints: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the prompt and while decoding; tokens and log-probabilities equal the transformers engine's."""
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")  # vLLM binds each rank to a core of its own
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # `kept_tokens` travels to the workers
    path = tiny_checkpoints.checkpoint(name, checkpoints)
    reference = Reference(path)
    prompts = [engines.prompt(name, 1 + i % 3, seed=i) for i in range(len(CHOICES))]
    given: dict[str, Any] = {"max_tokens": 60, "temperature": 0, "ignore_eos": True, "logprobs": 1}
    params = [SamplingParams(**given, extra_args={"foveakv": each}) for each in CHOICES]
    kept = {}
    for ranks in (1, 2):
        with engines.engine(path, "random", {"budget": 0.5}, tensor_parallel_size=ranks) as llm:
            pool = engines.scheduler_of(llm).kv_cache_manager.block_pool
            free = pool.get_num_free_blocks()
            outputs = llm.generate(prompts, params, use_tqdm=False)
            assert pool.get_num_free_blocks() == free
            found = [dict(each) for each in llm.collective_rpc(kept_tokens)]
        assert len(found) == ranks
        kept[ranks] = [[each[output.request_id] for output in outputs] for each in found]
        for prompt, output, choice in zip(prompts, outputs, CHOICES, strict=True):
            tokens, chosen = engines.chosen(output)
            cache = foveakv.cache_for(reference.model, get(choice["method"], **choice["options"]))
            check(reference.log_probabilities(prompt, None, tokens, cache), tokens, chosen)
    assert kept[2] == [kept[1][0]] * 2

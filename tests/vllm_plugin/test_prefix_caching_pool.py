"""With vLLM's prefix caching, in a pool so small that requests are preempted and blocks are reused."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import engines
import tiny_checkpoints
from dropped_reference import Reference, check
from vllm import SamplingParams

import foveakv
from foveakv.methods import get

NAME = "tiny-llava"
HAE: dict[str, Any] = {"ddes": False, "target_visual_tokens": 0.25, "score_layer": 2}
CHOICES: list[Any] = [
    None,
    "off",
    "off",
    "off",
    {"method": "hae", "options": {**HAE, "target_visual_tokens": 0.5}},
    {"method": "hae", "options": {"scores": "shared", "score_layer": 2, "budget": 0.4, "recycle_bin_size": 8}},
    {"method": "streaming", "options": {"budget": 60, "sink": 3}},
]


def test_random_requests(checkpoints: Path) -> None:
    """Repeated images and texts, every choice, aborts and preemptions: every answer is as without a prefix cache."""
    path = tiny_checkpoints.checkpoint(NAME, checkpoints)
    reference, draw = Reference(path), random.Random(0)
    options = {"num_gpu_blocks_override": 24, "max_num_batched_tokens": 200, "max_num_seqs": 6, "max_model_len": 512}
    with engines.engine(path, "hae", HAE, enable_prefix_caching=True, **options) as llm:
        core, scheduler = llm.llm_engine, engines.scheduler_of(llm)
        pool = scheduler.kv_cache_manager.block_pool
        free, found = pool.get_num_free_blocks(), 0
        asked: dict[str, tuple[Any, Any]] = {}
        outputs: dict[str, Any] = {}
        alive: set[str] = set()
        waiting = [f"r{i}" for i in range(40)]
        with engines.counted(scheduler) as counts:
            while waiting or core.has_unfinished_requests():
                if waiting and draw.random() < 0.9:
                    name, choice = waiting.pop(), draw.choice(CHOICES)
                    text = draw.choice(["a cat on a mat.", "what is in the image? describe."])
                    prompt = engines.prompt(NAME, draw.randint(0, 3), seed=draw.randint(0, 1), text=text)
                    params = SamplingParams(
                        max_tokens=draw.randint(20, 120), temperature=0, ignore_eos=True, logprobs=1,
                        extra_args=None if choice is None else {"foveakv": choice},
                    )  # fmt: skip
                    core.add_request(name, prompt, params)
                    asked[name] = prompt, choice or {"method": "hae", "options": HAE}
                    alive.add(name)
                for output in core.step():
                    if output.finished:
                        outputs[output.request_id] = output
                        alive.discard(output.request_id)
                        found += output.num_cached_tokens
                if alive and draw.random() < 0.02:
                    core.abort_request([name := draw.choice(sorted(alive))])
                    alive.discard(name)
        assert pool.get_num_free_blocks() == free
    assert found > 0
    assert counts["preempted"] > 0
    finished = [name for name, each in outputs.items() if each.outputs[0].finish_reason == "length"]
    assert len(finished) > 20
    for name in finished:
        (prompt, choice), (tokens, chosen) = asked[name], engines.chosen(outputs[name])
        cache = None
        if choice != "off" and "multi_modal_data" in prompt:
            cache = foveakv.cache_for(reference.model, get(choice["method"], **choice["options"]))
            assert outputs[name].num_cached_tokens == 0
        check(reference.log_probabilities(prompt, None, tokens, cache), tokens, chosen)

"""With vLLM's prefix caching, in a pool so small that requests are preempted and blocks are reused."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import engines
import tiny_checkpoints
from dropped_reference import Reference, check
from vllm import SamplingParams

NAME = "tiny-llava"
HAE: dict[str, Any] = {"ddes": False, "target_visual_tokens": 0.25, "score_layer": 2}
OFF: dict[str, Any] = {"foveakv": "off"}
HALF: dict[str, Any] = {"foveakv": {"method": "hae", "options": {**HAE, "target_visual_tokens": 0.5}}}


def test_random_requests_in_a_small_pool(checkpoints: Path) -> None:
    """Repeated images and texts, every choice, aborts and preemptions: every answer is as without a prefix cache."""
    path = tiny_checkpoints.checkpoint(NAME, checkpoints)
    reference, draw = Reference(path), random.Random(0)
    options = {"num_gpu_blocks_override": 24, "max_num_batched_tokens": 200, "max_num_seqs": 6, "max_model_len": 512}
    with engines.engine(path, "hae", HAE, enable_prefix_caching=True, **options) as small:
        core, scheduler = small.llm_engine, engines.scheduler_of(small)
        pool, preempted = scheduler.kv_cache_manager.block_pool, []
        preempt = scheduler._preempt_request
        scheduler._preempt_request = lambda request, *more, **named: (
            preempted.append(request.request_id), preempt(request, *more, **named)
        )[1]  # fmt: skip
        free = pool.get_num_free_blocks()
        prompts, outputs, alive, found = {}, {}, set(), 0
        waiting = [f"r{i}" for i in range(40)]
        while waiting or core.has_unfinished_requests():
            if waiting and draw.random() < 0.9:
                name = waiting.pop()
                text = draw.choice(["a cat on a mat.", "what is in the image? describe."])
                prompts[name] = engines.prompt(NAME, draw.randint(0, 3), seed=draw.randint(0, 1), text=text)
                params = SamplingParams(
                    max_tokens=draw.randint(20, 120), temperature=0, ignore_eos=True, logprobs=1,
                    extra_args=draw.choice([None, None, OFF, HALF]),
                )  # fmt: skip
                core.add_request(name, prompts[name], params)
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
        finished = [each for name, each in outputs.items() if each.outputs[0].finish_reason == "length"]
        assert len(finished) > 20
        assert found > 0
        assert preempted
        outcomes = engines.outcomes(finished)
        assert sum(each is not None for each in outcomes) > 5
        for output, outcome in zip(finished, outcomes, strict=True):
            tokens, chosen = engines.chosen(output)
            kept = None if outcome is None else outcome.kept
            check(reference.log_probabilities(prompts[output.request_id], kept, tokens), tokens, chosen)

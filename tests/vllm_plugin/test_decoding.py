"""Requests whose method evicts while decoding: equal to the transformers engine with the same method and settings."""

from __future__ import annotations

import random
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
    {"method": "hae", "options": {**SHARED, "budget": 0.4, "recycle_bin_size": 8}},
    {"method": "hae", "options": {**SHARED, "budget": 70, "recycle_bin_size": 64, "sink": 2, "recent": 6}},
    {"method": "streaming", "options": {"budget": 50, "sink": 3}},
    {"method": "hae", "options": {**SHARED, "dap": False, "candidates": "prompt", "recycle_bin_size": 5}},
    {"method": "random", "options": {"budget": 0.3}},
    {"method": "streaming", "options": {"budget": 130}},
]
TOKENS = 90


def expected(reference: Reference, prompt: dict[str, Any], choice: dict[str, Any], tokens: list[int]) -> Any:
    """The log-probabilities of the transformers engine, which is made to generate the same tokens, and its cache."""
    cache = foveakv.cache_for(reference.model, get(choice["method"], **choice["options"]))
    return reference.log_probabilities(prompt, None, tokens, cache), cache


@pytest.mark.parametrize("name", tiny_checkpoints.BUILD)
def test_equal_to_the_transformers_engine(checkpoints: Path, name: str) -> None:
    """Requests with different methods in the same steps; one that does not evict while decoding, and one of text."""
    path = tiny_checkpoints.checkpoint(name, checkpoints)
    reference = Reference(path)
    prompts = [engines.prompt(name, 1 + i % 3, seed=i) for i in range(len(CHOICES))] + [engines.prompt(name, 0)]
    extra = [*({"foveakv": each} for each in CHOICES), None]
    given: dict[str, Any] = {"max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "logprobs": 1}
    params = [SamplingParams(**given, extra_args=each) for each in extra]
    with engines.engine(path, "random", {"budget": 0.5}) as llm:
        pool = engines.scheduler_of(llm).kv_cache_manager.block_pool
        free = pool.get_num_free_blocks()
        with engines.recorded_positions() as positions:
            outputs = llm.generate(prompts, params, use_tqdm=False)
        assert pool.get_num_free_blocks() == free
    for prompt, output, choice in zip(prompts, outputs, CHOICES, strict=False):
        tokens, chosen = engines.chosen(output)
        logs, cache = expected(reference, prompt, choice, tokens)
        check(logs, tokens, chosen)
        report = output.kv_transfer_params["foveakv"]
        assert (report["evicted_while_decoding"] > 0) == (choice["method"] != "random")
        if choice["method"] != "random":
            assert positions[output.request_id] == cache.kept(0)[0, 0].sort().values.tolist()
        with pytest.raises(AssertionError):  # what was evicted matters
            check(reference.log_probabilities(prompt, None, tokens), tokens, chosen, 1e-2)
    tokens, chosen = engines.chosen(outputs[-1])
    check(reference.log_probabilities(prompts[-1], None, tokens), tokens, chosen)


@pytest.mark.parametrize("batched_tokens", [2048, 120])
def test_preempted_requests_repeat_what_they_evicted(checkpoints: Path, batched_tokens: int) -> None:
    """In a pool that is too small, recomputed in one piece and in chunks."""
    name = "tiny-llava"
    path = tiny_checkpoints.checkpoint(name, checkpoints)
    reference = Reference(path)
    # The first two grow until the others, which do not, are preempted.
    choices: list[Any] = [{"method": "off"}, {"method": "off"}, *CHOICES[:4]]
    prompts = [engines.prompt(name, (1, 1, 2, 1, 3, 1)[i], seed=i) for i in range(6)]
    given: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "logprobs": 1}
    params = [
        SamplingParams(**given, max_tokens=150 if i > 1 else 200, extra_args={"foveakv": each})
        for i, each in enumerate(choices)
    ]
    small: dict[str, Any] = {"num_gpu_blocks_override": 24, "max_model_len": 512}
    with engines.engine(path, "off", max_num_batched_tokens=batched_tokens, **small) as llm:
        scheduler = engines.scheduler_of(llm)
        pool = scheduler.kv_cache_manager.block_pool
        free = pool.get_num_free_blocks()
        with engines.counted(scheduler) as counts, engines.replayed() as evictions:
            outputs = llm.generate(prompts, params, use_tqdm=False)
        assert pool.get_num_free_blocks() == free
    assert counts["preempted"] > 0
    assert evictions[0] > 0
    for prompt, output, choice in zip(prompts, outputs, choices, strict=True):
        tokens, chosen = engines.chosen(output)
        if choice["method"] == "off":
            check(reference.log_probabilities(prompt, None, tokens), tokens, chosen)
        else:
            check(expected(reference, prompt, choice, tokens)[0], tokens, chosen)


def test_blocks_return_to_the_pool_while_the_request_runs(checkpoints: Path) -> None:
    """The stored tokens are bounded, and so are the blocks in use."""
    name = "tiny-llava"
    path = tiny_checkpoints.checkpoint(name, checkpoints)
    with engines.engine(path, "off") as llm:
        core, pool = llm.llm_engine, engines.scheduler_of(llm).kv_cache_manager.block_pool
        before = pool.get_num_free_blocks()
        for choice, most in (({"method": "streaming", "options": {"budget": 64}}, 3), (CHOICES[1], 5)):
            given: dict[str, Any] = {"max_tokens": 300, "temperature": 0, "ignore_eos": True}
            core.add_request("a", engines.prompt(name, 3), SamplingParams(**given, extra_args={"foveakv": choice}))
            used = []
            while core.has_unfinished_requests():
                core.step()
                used.append(before - pool.get_num_free_blocks())
            assert len(used) == 300
            # Whole blocks are freed as soon as E // 32 grows, which leaves at most one block beyond what is stored.
            assert max(used[:-1]) <= most
            assert used[-1] == 0


def test_random_requests_leave_an_empty_pool(checkpoints: Path) -> None:
    """With aborts, different methods, a small pool and chunks."""
    name = "tiny-llava"
    path = tiny_checkpoints.checkpoint(name, checkpoints)
    reference, draw = Reference(path), random.Random(0)
    small = {"num_gpu_blocks_override": 50, "max_num_batched_tokens": 150, "max_num_seqs": 6}
    with engines.engine(path, "hae", CHOICES[0]["options"], **small) as llm:
        core, pool = llm.llm_engine, engines.scheduler_of(llm).kv_cache_manager.block_pool
        free = pool.get_num_free_blocks()
        started: dict[str, Any] = {}
        finished: dict[str, Any] = {}
        alive: set[str] = set()
        while len(started) < 14 or core.has_unfinished_requests():
            if len(started) < 14 and draw.random() < 0.3:
                key, choice = f"r{len(started)}", draw.choice([None, *CHOICES])
                prompt = engines.prompt(name, draw.randint(0, 5), seed=draw.randint(0, 99))
                params = SamplingParams(
                    max_tokens=draw.randint(1, 120), temperature=0, ignore_eos=True, logprobs=1,
                    extra_args=None if choice is None else {"foveakv": choice},
                )  # fmt: skip
                core.add_request(key, prompt, params)
                started[key] = prompt, choice or CHOICES[0]
                alive.add(key)
            for output in core.step():
                if output.finished:
                    finished[output.request_id] = output
                    alive.discard(output.request_id)
            if alive and draw.random() < 0.015:
                key = draw.choice(sorted(alive))
                core.abort_request([key])
                alive.discard(key)
        assert pool.get_num_free_blocks() == free
        done = [(key, each) for key, each in finished.items() if each.outputs[0].finish_reason == "length"]
        assert 10 <= len(done) < len(started)
        for key, output in done:
            prompt, choice = started[key]
            tokens, chosen = engines.chosen(output)
            if "multi_modal_data" in prompt:
                check(expected(reference, prompt, choice, tokens)[0], tokens, chosen)
            else:
                check(reference.log_probabilities(prompt, None, tokens), tokens, chosen)
        core.add_request("last", engines.prompt(name, 0), SamplingParams(max_tokens=1))
        while core.has_unfinished_requests():
            core.step()
        side = engines.worker_side()
        assert side._compressed == side._by_block == side._reading == side._steps == {}
        assert engines.connector_of(llm).scheduler._known == {}


def test_a_method_that_fails_while_decoding_ends_its_request_only(
    checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from foveakv.methods.streaming import Streaming

    name = "tiny-llava"
    path = tiny_checkpoints.checkpoint(name, checkpoints)
    decode = Streaming.decode

    def failing(self: Streaming, view: Any) -> Any:
        if view.seen == view.request.prompt.columns + 20:
            raise ValueError("a bug in a method")
        return decode(self, view)

    monkeypatch.setattr(Streaming, "decode", failing)
    params = [
        SamplingParams(max_tokens=40, temperature=0, ignore_eos=True, extra_args={"foveakv": choice})
        for choice in (CHOICES[2], CHOICES[0])
    ]
    with engines.engine(path, "off") as llm:
        pool = engines.scheduler_of(llm).kv_cache_manager.block_pool
        free = pool.get_num_free_blocks()
        outputs = llm.generate([engines.prompt(name, 2)] * 2, params, use_tqdm=False)
        assert [each.outputs[0].finish_reason for each in outputs] == ["error", "length"]
        assert len(outputs[1].outputs[0].token_ids) == 40
        assert pool.get_num_free_blocks() == free

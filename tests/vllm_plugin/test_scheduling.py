"""What vLLM's scheduler does to compressed requests: chunks, preemption, aborts, several answers, a full pool."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import engines
import pytest
import tiny_checkpoints
from dropped_reference import Reference, check

import foveakv

HAE: dict[str, Any] = {"ddes": False, "target_visual_tokens": 0.25, "score_layer": 2}
NAME = "tiny-llava"


@pytest.fixture(scope="module")
def path(checkpoints: Path) -> Path:
    return tiny_checkpoints.checkpoint(NAME, checkpoints)


@pytest.fixture(scope="module")
def reference(path: Path) -> Reference:
    return Reference(path)


def check_all(reference: Reference, prompts: list[Any], outputs: list[Any]) -> None:
    for prompt, output, outcome in zip(prompts, outputs, engines.outcomes(outputs), strict=True):
        tokens, chosen = engines.chosen(output)
        kept = None if outcome is None else outcome.kept
        check(reference.log_probabilities(prompt, kept, tokens), tokens, chosen)


def test_prefill_in_chunks(path: Path, reference: Reference) -> None:
    prompts = [engines.prompt(NAME, 1 + i % 3, seed=i) for i in range(4)]
    with engines.engine(path, "hae", HAE, max_num_batched_tokens=56) as llm:
        outputs = engines.generate(llm, prompts)
        check_all(reference, prompts, outputs)
        for prompt, outcome in zip(prompts, engines.outcomes(outputs), strict=True):
            cache = foveakv.cache_for(reference.model, foveakv.HAE(**HAE))
            reference.model(**reference.inputs(prompt), past_key_values=cache, use_cache=True)
            assert outcome.kept == cache.kept(0)[0, 0].tolist()


def test_more_requests_fit_and_preempted_ones_are_recomputed_exactly(path: Path, reference: Reference) -> None:
    prompts = [engines.prompt(NAME, 1 + i % 3, seed=i) for i in range(6)]
    counts = {}
    for method in (None, "hae"):
        with engines.engine(path, method, HAE, num_gpu_blocks_override=24, max_model_len=512) as llm:
            scheduler = engines.scheduler_of(llm)
            pool = scheduler.kv_cache_manager.block_pool
            free = pool.get_num_free_blocks()
            with engines.counted(scheduler) as counts[method]:
                outputs = engines.generate(llm, prompts, 100)
            assert pool.get_num_free_blocks() == free
            if method is not None:
                check_all(reference, prompts, outputs)
    assert counts["hae"]["preempted"] > 0
    assert counts["hae"]["side by side"] >= 2 * counts[None]["side by side"]


def test_preempted_requests_are_recomputed_in_chunks(path: Path, reference: Reference) -> None:
    prompts = [engines.prompt(NAME, 1 + i % 3, seed=i) for i in range(6)]
    options = {"num_gpu_blocks_override": 24, "max_model_len": 512, "max_num_batched_tokens": 120}
    with engines.engine(path, "hae", HAE, **options) as llm:
        with engines.counted(engines.scheduler_of(llm)) as counts:
            outputs = engines.generate(llm, prompts, 120)
        check_all(reference, prompts, outputs)
    assert counts["preempted"] > 0


def test_blocks_are_free_while_the_request_runs(path: Path) -> None:
    from vllm import SamplingParams

    with engines.engine(path, "hae", HAE) as llm:
        core, pool = llm.llm_engine, engines.scheduler_of(llm).kv_cache_manager.block_pool
        before = pool.get_num_free_blocks()
        core.add_request("a", engines.prompt(NAME, 3), SamplingParams(max_tokens=40, temperature=0, ignore_eos=True))
        core.step()
        (outcome,) = engines.worker_side().recent
        whole = -(-outcome.prompt // 32)
        assert len(outcome.freed) == (outcome.prompt - len(outcome.kept)) // 32 > 5
        assert pool.get_num_free_blocks() == before - whole + len(outcome.freed)
        core.abort_request(["a"])
        core.step()
        assert pool.get_num_free_blocks() == before


def test_random_requests_with_aborts_leave_an_empty_pool(path: Path, reference: Reference) -> None:
    from vllm import SamplingParams

    draw = random.Random(0)
    options = {"num_gpu_blocks_override": 60, "max_num_batched_tokens": 200, "max_num_seqs": 8}
    with engines.engine(path, "hae", HAE, **options) as llm:
        core, pool = llm.llm_engine, engines.scheduler_of(llm).kv_cache_manager.block_pool
        free = pool.get_num_free_blocks()
        prompts, outputs, alive = {}, {}, set()
        waiting = [f"r{i}" for i in range(30)]
        while waiting or core.has_unfinished_requests():
            if waiting and draw.random() < 0.5:
                name = waiting.pop()
                prompts[name] = engines.prompt(NAME, draw.randint(0, 6), seed=draw.randint(0, 99))
                params = SamplingParams(
                    max_tokens=draw.randint(1, 40), temperature=0, ignore_eos=True, logprobs=1,
                    extra_args=draw.choice([None, None, {"foveakv": "off"}]),
                )  # fmt: skip
                core.add_request(name, prompts[name], params)
                alive.add(name)
            for output in core.step():
                if output.finished:
                    outputs[output.request_id] = output
                    alive.discard(output.request_id)
            if alive and draw.random() < 0.03:
                name = draw.choice(sorted(alive))
                core.abort_request([name])
                alive.discard(name)
        assert pool.get_num_free_blocks() == free
        finished = [each for name, each in outputs.items() if each.outputs[0].finish_reason == "length"]
        assert len(finished) > 15
        check_all(reference, [prompts[each.request_id] for each in finished], finished)
        core.add_request("last", engines.prompt(NAME, 0), SamplingParams(max_tokens=1))
        while core.has_unfinished_requests():
            core.step()
        side = engines.worker_side()
        assert side._compressed == side._by_block == side._reading == {}
        assert engines.connector_of(llm).scheduler._known == {}


def test_several_answers_and_refused_requests(path: Path, reference: Reference) -> None:
    with engines.engine(path, "hae", HAE) as llm:
        prompt = engines.prompt(NAME, 2)
        (output,) = engines.generate(llm, [prompt], 8, n=3, temperature=1.0, seed=1)
        kept = engines.worker_side().recent[-1].kept
        for n in range(3):
            tokens, chosen = engines.chosen(output, n)
            expected = reference.log_probabilities(prompt, kept, tokens)
            found = [float(row[token]) for row, token in zip(expected, tokens, strict=True)]
            assert found == pytest.approx(chosen, abs=1e-4)
        # Two requests of the four ask for something that vLLM cannot do: they end with an error, the others run.
        from vllm import SamplingParams

        extra = [None, {"foveakv": {"method": "snapkv"}}, {"foveakv": {"method": "random", "options": {"budget": 0.5}}}]
        given: dict[str, Any] = {"max_tokens": 4, "temperature": 0, "ignore_eos": True}
        params = [SamplingParams(**given, extra_args=each) for each in extra]
        # vLLM's scheduler asks connectors about these differently.
        params.append(SamplingParams(**given, extra_args=extra[1], prompt_logprobs=1))
        outputs = llm.generate([prompt] * 4, params, use_tqdm=False)
        assert [each.outputs[0].finish_reason for each in outputs] == ["length", "error", "length", "error"]
        assert [len(each.outputs[0].token_ids) for each in outputs] == [4, 0, 4, 0]
        assert outputs[2].kv_transfer_params["foveakv"]["method"] == "random"
        assert engines.scheduler_of(llm).kv_cache_manager.block_pool.get_num_free_blocks() == 8191

"""Options of the engine: compiled models, half precision, images across several chunks, the asynchronous engine."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import engines
import pytest
import tiny_checkpoints
import torch
from dropped_reference import Reference, check
from vllm import SamplingParams

NAME = "tiny-llava"
HAE: dict[str, Any] = {"ddes": False, "target_visual_tokens": 0.25, "score_layer": 2}


@pytest.fixture(scope="module")
def path(checkpoints: Path) -> Path:
    return tiny_checkpoints.checkpoint(NAME, checkpoints)


@pytest.fixture(scope="module")
def reference(path: Path) -> Reference:
    return Reference(path)


def prompts() -> list[Any]:
    return [engines.prompt(NAME, count, seed=i) for i, count in enumerate((1, 3, 0, 2))]


def check_all(reference: Reference, outputs: list[Any], tolerance: float = 1e-4) -> list[Any]:
    """Compare with transformers; returns what was done to the requests."""
    outcomes = engines.outcomes(outputs)
    for prompt, output, outcome in zip(prompts(), outputs, outcomes, strict=True):
        tokens, chosen = engines.chosen(output)
        kept = None if outcome is None else outcome.kept
        check(reference.log_probabilities(prompt, kept, tokens), tokens, chosen, tolerance)
    assert [outcome is None for outcome in outcomes] == [False, False, True, False]
    return outcomes


def test_compiled(path: Path, reference: Reference) -> None:
    with engines.engine(path, "hae", HAE, enforce_eager=False) as llm:
        assert llm.llm_engine.vllm_config.compilation_config.mode.name != "NONE"
        check_all(reference, engines.generate(llm, prompts()))


def test_bfloat16(path: Path, reference: Reference) -> None:
    """Log-probabilities are close to those in float32, with the same tokens dropped."""
    with engines.engine(path, "hae", HAE, dtype="bfloat16") as llm:
        outputs = engines.generate(llm, prompts())
        check_all(reference, outputs, 0.05)
        tokens, chosen = engines.chosen(outputs[0])
        expected = reference.log_probabilities(prompts()[0], None, tokens)
        with pytest.raises(AssertionError):  # what was evicted matters more
            check(expected, tokens, chosen, 0.05)


@pytest.mark.parametrize("chunk", [33, 64])
def test_images_across_several_chunks(path: Path, reference: Reference, chunk: int) -> None:
    whole: list[Any] = []
    for size in (2048, chunk):
        with engines.engine(path, "hae", HAE, max_num_batched_tokens=size, max_num_seqs=4) as llm:
            outcomes = check_all(reference, engines.generate(llm, prompts()))
            whole.append([outcome and outcome.kept for outcome in outcomes])
    assert whole[0] == whole[1]


def test_the_asynchronous_engine_streams_and_aborts(path: Path, reference: Reference) -> None:
    """In another process, as the server runs it."""
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    args = AsyncEngineArgs(
        model=str(path), dtype="float32", max_model_len=1024, enforce_eager=True, block_size=32,
        enable_prefix_caching=False, gpu_memory_utilization=0.2, limit_mm_per_prompt={"image": 8},
        kv_transfer_config=engines.transfer_config("hae", **HAE),
    )  # fmt: skip

    async def ask(engine: Any, name: str, prompt: Any, stop: int | None) -> list[Any]:
        params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, logprobs=1)
        found = []
        async for output in engine.generate(prompt, params, name):
            found.append(output)
            if stop is not None and len(found) == stop:
                await engine.abort(name)
                break
        return found

    async def run() -> list[list[Any]]:
        engine = AsyncLLM.from_engine_args(args)
        try:
            every = [*prompts(), *prompts()]
            stops = [None] * 4 + [1, 2, 3, 4]
            return await asyncio.gather(
                *(ask(engine, f"r{i}", each, stop) for i, (each, stop) in enumerate(zip(every, stops, strict=True)))
            )
        finally:
            engine.shutdown()

    streams = asyncio.run(run())
    for prompt, stream in zip(prompts(), streams, strict=False):
        assert len(stream) > 3  # it streams
        tokens, chosen = engines.chosen(stream[-1])
        report = stream[-1].kv_transfer_params
        if "multi_modal_data" not in prompt:
            assert report is None
            check(reference.log_probabilities(prompt, None, tokens), tokens, chosen)
            continue
        kept = kept_by_transformers(reference, prompt)
        assert report["foveakv"]["stored_prompt_tokens"] == len(kept)
        check(reference.log_probabilities(prompt, kept, tokens), tokens, chosen)


def kept_by_transformers(reference: Reference, prompt: Any) -> list[int]:
    import foveakv

    cache = foveakv.cache_for(reference.model, foveakv.HAE(**HAE))
    reference.model(**reference.inputs(prompt), past_key_values=cache, use_cache=True)
    found: list[int] = cache.kept(0)[0, 0].tolist()
    return found


def test_embeddings_of_images(path: Path, reference: Reference) -> None:
    prompt = engines.prompt(NAME, 2)
    inputs = reference.inputs(prompt)
    with torch.no_grad():
        features = reference.model.model.get_image_features(inputs["pixel_values"])
    given = {**prompt, "multi_modal_data": {"image": torch.stack(list(getattr(features, "pooler_output", features)))}}
    with engines.engine(path, "hae", HAE, enable_mm_embeds=True) as llm:
        for output in engines.generate(llm, [given, prompt]):
            kept = engines.worker_side().recent[-1].kept
            tokens, chosen = engines.chosen(output)
            check(reference.log_probabilities(prompt, kept, tokens), tokens, chosen)
        assert len({tuple(each.kept) for each in engines.worker_side().recent}) == 1

"""vLLM engines in this process, and prompts for them."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import tiny_checkpoints
from PIL import Image

from foveakv.engines.vllm import private
from foveakv.engines.vllm.settings import CONNECTOR


def transfer_config(method: str, **options: Any) -> dict[str, Any]:
    """Return `kv_transfer_config` for a method."""
    extra = {"method": method, "options": options}
    return {"kv_connector": CONNECTOR, "kv_role": "kv_both", "kv_connector_extra_config": extra}


@contextmanager
def engine(
    path: Path | str, method: str | None = None, options: dict[str, Any] | None = None, **more: Any
) -> Iterator[Any]:
    """A `vllm.LLM`, shut down at the end of the block. method: None = without the plugin's connector."""
    from vllm import LLM

    private.register()
    if method is not None:
        more.setdefault("kv_transfer_config", transfer_config(method, **(options or {})))
    given: dict[str, Any] = {
        "dtype": "float32", "max_model_len": 1024, "max_num_batched_tokens": 2048, "enforce_eager": True,
        "block_size": 32, "enable_prefix_caching": False, "gpu_memory_utilization": 0.2, "seed": 0,
        "limit_mm_per_prompt": {"image": 8},
    }  # fmt: skip
    llm = LLM(model=str(path), **{**given, **more})
    try:
        yield llm
    finally:
        close(llm)


def close(llm: Any) -> None:
    """Shut an engine down, so that the next one can be made in this process."""
    llm.llm_engine.engine_core.shutdown()
    del llm
    clean()


def clean() -> None:
    """Remove what an engine, or an attempt to make one, left in this process."""
    from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    ensure_kv_transfer_shutdown()
    cleanup_dist_env_and_memory()
    gc.collect()


def scheduler_of(llm: Any) -> Any:
    """Return the scheduler of an engine in this process."""
    return llm.llm_engine.engine_core.engine_core.scheduler


def worker_side() -> Any:
    """Return the plugin's worker side of the engine in this process."""
    from foveakv.engines.vllm.rewriting import active_worker

    return active_worker()


def images(count: int, seed: int = 0) -> list[Image.Image]:
    """Return images of different sizes."""
    generator = np.random.RandomState(seed)
    sizes = [(336, 448), (392, 224), (280, 280), (448, 336)]
    return [Image.fromarray((generator.rand(*sizes[i % len(sizes)], 3) * 255).astype("uint8")) for i in range(count)]


def prompt(name: str, count: int, seed: int = 0, text: str = "what is in the image? describe.") -> dict[str, Any]:
    """Return a prompt of vLLM with `count` images; name: of the checkpoint."""
    holder = tiny_checkpoints.image_text(name)
    if count == 0:
        return {"prompt": text}
    return {"prompt": "a photo " + holder * count + text, "multi_modal_data": {"image": images(count, seed)}}


def generate(llm: Any, prompts: list[dict[str, Any]], tokens: int = 12, **more: Any) -> list[Any]:
    """Generate greedily; returns vLLM's outputs in the order of the prompts."""
    from vllm import SamplingParams

    params = SamplingParams(**{"max_tokens": tokens, "temperature": 0, "ignore_eos": True, "logprobs": 1, **more})
    return llm.generate(prompts, params, use_tqdm=False)


def chosen(output: Any, n: int = 0) -> tuple[list[int], list[float]]:
    """Return the tokens of an output and their log-probabilities."""
    one = output.outputs[n]
    tokens = list(one.token_ids)
    return tokens, [step[token].logprob for token, step in zip(tokens, one.logprobs, strict=True)]


def connector_of(llm: Any) -> Any:
    """Return the plugin's connector in the scheduler."""
    return scheduler_of(llm).connector


def outcomes(outputs: list[Any]) -> list[Any]:
    """Return what the worker did to each request of this engine, None where it did nothing."""
    recent = {each.req_id.rsplit("-", 1)[0]: each for each in worker_side().recent}
    return [recent.get(output.request_id) for output in outputs]


@contextmanager
def recorded_maps(llm: Any) -> Iterator[list[Any]]:
    """The prompt maps of the requests that are added inside the block and compressed, in order."""
    side = connector_of(llm).scheduler
    maps: list[Any] = []
    add = side.add

    def recorded(request: Any) -> None:
        add(request)
        if request.request_id in side._known:
            maps.append(side._known[request.request_id].prompt)

    side.add = recorded
    try:
        yield maps
    finally:
        side.add = add


@contextmanager
def recorded_positions() -> Iterator[dict[str, list[int]]]:
    """The tokens that each request stored after its last step inside the block, by its id without suffix, sorted."""
    side, found = worker_side(), {}
    complete = side._complete_step

    def recorded(step: Any) -> Any:
        freed = complete(step)
        found[step.known.req_id.rsplit("-", 1)[0]] = step.known.stored(step.stop).sort().values.tolist()
        return freed

    side._complete_step = recorded
    try:
        yield found
    finally:
        side._complete_step = complete


@contextmanager
def counted(scheduler: Any) -> Iterator[dict[str, int]]:
    """Count preemptions and the most requests that run side by side."""
    counts = {"preempted": 0, "side by side": 0}
    preempt, schedule = scheduler._preempt_request, scheduler.schedule

    def preempt_and_count(*args: Any, **kwargs: Any) -> Any:
        counts["preempted"] += 1
        return preempt(*args, **kwargs)

    def schedule_and_count(*args: Any, **kwargs: Any) -> Any:
        made = schedule(*args, **kwargs)
        counts["side by side"] = max(counts["side by side"], len(scheduler.running))
        return made

    scheduler._preempt_request, scheduler.schedule = preempt_and_count, schedule_and_count
    yield counts


@contextmanager
def replayed() -> Iterator[list[int]]:
    """The number of evictions that recomputed requests repeat inside the block, in a list of one."""
    side, found = worker_side(), [0]
    complete = side._complete_step

    def counted(step: Any) -> Any:
        found[0] += len(step.known.missing(step.stop))
        return complete(step)

    side._complete_step = counted
    try:
        yield found
    finally:
        side._complete_step = complete

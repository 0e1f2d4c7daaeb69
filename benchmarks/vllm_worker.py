"""A vLLM engine in a process of its own, for `benchmarks.vllm`: tasks come as JSON lines, and answers go back so.

It runs under the Python of an environment that has vLLM. The engine runs in this process, so that its scheduler can be
watched. Sides are processes, because vLLM keeps one connector per process.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

SETTINGS = {
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
}
MARK = "<image>"


class Engine:
    """The embedded model in vLLM. method: None = without the plugin's connector."""

    def __init__(self, method: str | None, options: dict[str, Any], blocks: int | None, block: int = 32) -> None:
        from transformers import AutoProcessor
        from vllm import LLM

        from foveakv.engines.vllm import private
        from foveakv.models import embedded

        private.register()
        path = str(embedded.assemble())
        more: dict[str, Any] = {}
        if method is not None:
            extra = {"method": method, "options": options}
            more["kv_transfer_config"] = {
                "kv_connector": "FoveaKVConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra,
            }  # fmt: skip
        if blocks is not None:
            more["num_gpu_blocks_override"] = blocks + 1  # vLLM keeps one for itself
        length = 2048 if blocks is None else min(2048, blocks * block)  # a request must fit
        self.processor = AutoProcessor.from_pretrained(path)
        self.llm = LLM(
            model=path, model_impl="transformers", dtype="float32", max_model_len=length, max_num_batched_tokens=2048,
            enforce_eager=True, block_size=block, enable_prefix_caching=False, gpu_memory_utilization=0.2, seed=0,
            limit_mm_per_prompt={"image": 40}, mm_processor_cache_gb=0, **more,
        )  # fmt: skip
        self.engine = self.llm.llm_engine
        self.core = self.engine.engine_core.engine_core
        self.numbers = 0

    def prompt(self, task: str, number: int) -> dict[str, Any]:
        """An item of the evaluation's tasks as a prompt of vLLM."""
        from foveakv.evaluation import tasks

        item = tasks.find(task).item(number)
        content: list[dict[str, str]] = []
        for i, piece in enumerate(item.turns[0].text.split(MARK)):
            content += [{"type": "image"}] if i else []
            content += [{"type": "text", "text": piece}] if piece else []
        text = self.processor.apply_chat_template(
            [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
        )
        return {"prompt": text, "multi_modal_data": {"image": list(item.images)}} if item.images else {"prompt": text}

    def add(self, prompt: dict[str, Any], tokens: int, extra: Any = None, **more: Any) -> str:
        """Add a request; return its name."""
        from vllm import SamplingParams

        self.numbers += 1
        name = f"r{self.numbers}"
        given = None if extra is None else {"foveakv": extra}
        self.engine.add_request(
            name, prompt, SamplingParams(max_tokens=tokens, temperature=0, extra_args=given, **more)
        )
        return name

    def steps(self) -> Iterator[tuple[float, list[Any]]]:
        """Run to the end; yields the time after each step and its outputs."""
        while self.engine.has_unfinished_requests():
            outputs = self.engine.step()
            yield time.perf_counter(), outputs

    # ---- tasks

    def load(self, items: Sequence[tuple[str, int]], tokens: int) -> dict[str, Any]:
        """Send all requests at once; times of each from then, in the order of the items."""
        prompts = [self.prompt(*each) for each in items]
        pool = self.core.scheduler.kv_cache_manager.block_pool
        free = pool.get_num_free_blocks()
        start = time.perf_counter()
        names = [self.add(prompt, tokens, ignore_eos=True) for prompt in prompts]
        first: dict[str, float] = {}
        last: dict[str, float] = {}
        most, prompt_tokens = 0, {}
        preempted = 0
        preempt = self.core.scheduler._preempt_request

        def counted(*args: Any, **kwargs: Any) -> Any:
            nonlocal preempted
            preempted += 1
            return preempt(*args, **kwargs)

        self.core.scheduler._preempt_request = counted
        for now, outputs in self.steps():
            # Those that finished in this step ran in it too.
            done = sum(output.finished for output in outputs)
            most = max(most, len(self.core.scheduler.running) + done)
            for output in outputs:
                if output.outputs[0].token_ids:
                    first.setdefault(output.request_id, now - start)
                prompt_tokens[output.request_id] = len(output.prompt_token_ids)
                if output.finished:
                    last[output.request_id] = now - start
        self.core.scheduler._preempt_request = preempt
        return {
            "seconds": max(last.values()),
            "first_s": [first[name] for name in names],
            "token_s": [(last[name] - first[name]) / (tokens - 1) for name in names],
            "whole_s": [last[name] for name in names],
            "side_by_side": most,
            "preempted": preempted,
            "prompt_tokens": [prompt_tokens[name] for name in names],
            "leaked": free - pool.get_num_free_blocks(),
        }

    def scoring(self, items: Sequence[tuple[str, int]]) -> list[dict[str, float]]:
        """Read prompts one at a time: seconds of the prefill, and of image encoder and plugin in it."""
        from foveakv.engines.vllm import worker_side
        from foveakv.engines.vllm.rewriting import active_worker

        runner = self.core.model_executor.driver_worker.worker.model_runner
        side = active_worker()
        found = []
        for each in items:
            prompt = self.prompt(*each)
            name = self.add(prompt, 2, ignore_eos=True)
            with (
                timed(runner, "_execute_mm_encoder") as encoder,
                timed(worker_side, "decide") as decide,
                timed(side, "take_queries") as queries,
                timed(side, "_move_all") as moves,
            ):
                start = time.perf_counter()
                while not any(output.request_id == name for output in self.engine.step()):
                    pass
                prefill = time.perf_counter() - start
            for _ in self.steps():
                pass
            found.append(
                {
                    "prefill_s": prefill, "encoder_s": sum(encoder), "scoring_s": sum(decide) + sum(queries),
                    "moving_s": sum(moves), "calls": len(decide),
                }
            )  # fmt: skip
        return found

    def answers(self, items: Sequence[tuple[str, int, int]], extras: Sequence[Any]) -> list[list[dict[str, Any]]]:
        """Answer items (task, number, most tokens) with each choice of a method: tokens, text, and what was kept."""
        from foveakv.engines.vllm.rewriting import active_worker

        found = []
        for task, number, tokens in items:
            prompt = self.prompt(task, number)
            names = [self.add(prompt, tokens, extra) for extra in extras]
            done = {output.request_id: output for _, outputs in self.steps() for output in outputs if output.finished}
            kept = {each.req_id.rsplit("-", 1)[0]: each.kept for each in active_worker().recent}
            found.append(
                [
                    {
                        "tokens": list(done[name].outputs[0].token_ids), "text": done[name].outputs[0].text,
                        "kept": kept.get(name), "prompt_tokens": len(done[name].prompt_token_ids),
                    }
                    for name in names
                ]
            )  # fmt: skip
        return found


@contextmanager
def timed(owner: Any, name: str) -> Iterator[list[float]]:
    """Collect the seconds of each call of a function inside the block."""
    seconds: list[float] = []
    whole = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        try:
            return whole(*args, **kwargs)
        finally:
            seconds.append(time.perf_counter() - start)

    own = name in vars(owner)
    setattr(owner, name, call)
    try:
        yield seconds
    finally:
        if own:
            setattr(owner, name, whole)
        else:
            delattr(owner, name)


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what vLLM prints is no answer
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    import torch
    import transformers
    import vllm

    engine = Engine(**json.loads(sys.argv[1]))
    versions = {"vllm": vllm.__version__, "torch": torch.__version__, "transformers": transformers.__version__}
    print(json.dumps({"versions": versions, "threads": torch.get_num_threads()}), file=answers, flush=True)
    for line in sys.stdin:
        task = json.loads(line)
        print(json.dumps(getattr(engine, task.pop("do"))(**task)), file=answers, flush=True)


if __name__ == "__main__":
    main()

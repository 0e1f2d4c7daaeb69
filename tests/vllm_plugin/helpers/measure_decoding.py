"""Measure what eviction while decoding costs in vLLM, on the embedded model.

    OMP_NUM_THREADS=1 python tests/vllm_plugin/helpers/measure_decoding.py

Prints the CPU time of a decode step by the length of the prompt (median of a request, the best of three requests), and
how many of the tokens that the first flush of HAE's recycle bin evicts are the same if attention is computed in every
Nth step only.
"""

from __future__ import annotations

import os
import statistics
import time
from typing import Any

import engines

from foveakv.models import embedded

SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR",
}  # fmt: skip
CARDS, TOKENS, EVERY, BIN, ROUNDS = (16, 8), 20, (1, 4, 16), 64, 3
SHARED = {"scores": "shared", "recycle_bin_size": BIN}
# Nothing is evicted while the times are taken: the steady size is the prompt's and the bin holds all new tokens.
CHOICES: dict[str, Any] = {
    "off": {"method": "off"},
    "streaming": {"method": "streaming", "options": {"budget": 0.999}},
    "hae": {"method": "hae", "options": {**SHARED, "dap": False, "score_layer": 16}},
}
EVICTING = {"method": "hae", "options": {**SHARED, "budget": 0.3, "score_layer": 16}}
MORE = {"model_impl": "transformers", "max_model_len": 4096, "max_num_batched_tokens": 4096,
        "limit_mm_per_prompt": {"image": 32}}  # fmt: skip


def prompt(cards: int) -> dict[str, Any]:
    sample = embedded.sample_prompt(cards, ask=1)
    return {"prompt": sample.text, "multi_modal_data": {"image": sample.images}}


def steps(llm: Any, given: dict[str, Any], choice: Any, tokens: int) -> tuple[int, list[float]]:
    """Return the length of the prompt and the CPU seconds of every step of a request."""
    from vllm import SamplingParams

    core = llm.llm_engine
    params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True, extra_args={"foveakv": choice})
    core.add_request("a", given, params)
    found, length = [], 0
    while core.has_unfinished_requests():
        start = time.process_time()
        for output in core.step():
            length = len(output.prompt_token_ids)
        found.append(time.process_time() - start)
    return length, found


def first_flush(llm: Any, given: dict[str, Any]) -> set[int]:
    """Return the tokens that the first flush evicts."""
    side, found = engines.worker_side(), set[int]()
    complete = side._complete_step

    def recorded(step: Any) -> Any:
        before = set(step.known.stored(step.stop).tolist())
        freed = complete(step)
        found.update(before - set(step.known.stored(step.stop).tolist()))
        return freed

    side._complete_step = recorded
    steps(llm, given, EVICTING, BIN + 2)
    side._complete_step = complete
    return found


def main() -> None:
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    prompts = [prompt(cards) for cards in CARDS]
    with engines.engine(embedded.assemble(), "off", **MORE) as llm:
        side = engines.worker_side()
        cases = [(name, 1) for name in CHOICES] + [("hae", every) for every in EVERY[1:]]
        for given in prompts:
            best: dict[tuple[str, int], float] = {}
            for case in cases * ROUNDS:  # in turns, since other work on the machine disturbs one after the other
                name, side._attention_every = case
                length, found = steps(llm, given, CHOICES[name], TOKENS)
                best[case] = min(best.get(case, 9e9), 1e3 * statistics.median(found[5:]))
            for (name, every), time_of_step in best.items():
                print(f"{length} tokens, {name}, N={every}: {time_of_step:.1f} ms a step", flush=True)
        flushes = {}
        for side._attention_every in EVERY:
            flushes[side._attention_every] = [first_flush(llm, given) for given in prompts]
    for every in EVERY[1:]:
        same = [len(exact & found) for exact, found in zip(flushes[1], flushes[every], strict=True)]
        print(f"N={every}: {same} of the {BIN} tokens of the first flush are the same, by prompt", flush=True)


if __name__ == "__main__":
    main()

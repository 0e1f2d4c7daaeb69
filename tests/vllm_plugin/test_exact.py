"""Tokens and log-probabilities of compressed requests equal transformers with the same tokens dropped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import engines
import pytest
import tiny_checkpoints
from dropped_reference import Reference, check
from vllm import SamplingParams

import foveakv
from foveakv.core.prompt import PromptMap
from foveakv.methods import get

CHOICES: list[dict[str, Any]] = [
    {"method": "hae", "options": {"ddes": False, "target_visual_tokens": 0.25, "score_layer": 2}},
    {"method": "hae", "options": {"ddes": False, "score_layer": "1,3", "r": 1.0, "alpha": None}},
    {"method": "hae", "options": {"ddes": False, "score_layer": 0, "target_visual_tokens": 20, "value_norm": True}},
    {"method": "random", "options": {"budget": 0.3}},
    {"method": "newest_frames", "options": {"budget": 0.3}},
    {"method": "uniform_frames", "options": {"budget": 0.4}},
]
IMAGES = (1, 3, 2, 2, 3, 3)


@pytest.mark.parametrize("name", tiny_checkpoints.BUILD)
def test_equal_to_transformers(checkpoints: Path, name: str) -> None:
    """Requests with different methods, numbers of images and none, all read in one step."""
    path = tiny_checkpoints.checkpoint(name, checkpoints)
    reference = Reference(path)
    prompts = [engines.prompt(name, count, seed=i) for i, count in enumerate((*IMAGES, 0, 2))]
    extra = [*({"foveakv": each} for each in CHOICES), None, {"foveakv": "off"}]
    given: dict[str, Any] = {"max_tokens": 12, "temperature": 0, "ignore_eos": True, "logprobs": 1}
    params = [SamplingParams(**given, extra_args=each) for each in extra]
    with engines.engine(path, "random", {"budget": 0.5}, max_num_batched_tokens=4096) as llm:
        pool = engines.scheduler_of(llm).kv_cache_manager.block_pool
        free = pool.get_num_free_blocks()
        with engines.recorded_maps(llm) as maps:
            outputs = llm.generate(prompts, params, use_tqdm=False)
        outcomes = engines.outcomes(outputs)
        assert pool.get_num_free_blocks() == free
    for i, (prompt, output, outcome) in enumerate(zip(prompts, outputs, outcomes, strict=True)):
        inputs = reference.inputs(prompt)
        tokens, chosen = engines.chosen(output)
        assert inputs["input_ids"][0].tolist() == output.prompt_token_ids
        if i >= len(CHOICES):
            assert outcome is None
            assert output.kv_transfer_params is None
            check(reference.log_probabilities(prompt, None, tokens), tokens, chosen)
            continue
        types = inputs.get("mm_token_type_ids")
        expected = PromptMap.from_inputs(reference.model.config, inputs["input_ids"], mm_token_type_ids=types)
        assert maps[i].kinds.equal(expected.kinds)
        assert maps[i].index.equal(expected.index)
        assert outcome.kept == kept_by_transformers(reference, inputs, CHOICES[i])
        assert len(outcome.kept) < 0.8 * outcome.prompt
        check(reference.log_probabilities(prompt, outcome.kept, tokens), tokens, chosen)
        with pytest.raises(AssertionError):  # what was evicted matters
            check(reference.log_probabilities(prompt, None, tokens), tokens, chosen, 1e-2)
        assert output.kv_transfer_params["foveakv"] == {
            "method": CHOICES[i]["method"],
            "prompt_tokens": outcome.prompt,
            "stored_prompt_tokens": len(outcome.kept),
            "evicted_while_decoding": 0,
            "freed_blocks": (outcome.prompt - len(outcome.kept)) // 32,
        }


def kept_by_transformers(reference: Reference, inputs: Any, choice: dict[str, Any]) -> list[int]:
    """The tokens that the same method keeps in the transformers engine."""
    cache = foveakv.cache_for(reference.model, get(choice["method"], **choice["options"]))
    reference.model(**inputs, past_key_values=cache, use_cache=True)
    return cache.kept(0)[0, 0].tolist()

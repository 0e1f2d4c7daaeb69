"""Tokens and log-probabilities of compressed requests equal transformers with the same tokens dropped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import engines
import pytest
import tiny_checkpoints
from dropped_reference import Reference, check

import foveakv
from foveakv.core.prompt import PromptMap
from foveakv.methods import get

HAE = {"ddes": False, "target_visual_tokens": 0.25, "score_layer": 2}
CASES = [
    ("tiny-qwen2_5-vl", "hae", HAE),
    ("tiny-qwen3-vl", "hae", {"ddes": False, "score_layer": "1,2", "r": 1.0, "alpha": None}),
    ("tiny-llava", "hae", {**HAE, "score_layer": 0, "value_norm": True}),
    ("tiny-llava", "random", {"budget": 0.3}),
]


@pytest.mark.parametrize(("name", "method", "options"), CASES, ids=[f"{name}-{method}" for name, method, _ in CASES])
def test_equal_to_transformers(checkpoints: Path, name: str, method: str, options: dict[str, Any]) -> None:
    path = tiny_checkpoints.checkpoint(name, checkpoints)
    reference = Reference(path)
    prompts = [engines.prompt(name, count, seed=count) for count in (1, 3, 0, 2)]
    with engines.engine(path, method, options) as llm:
        pool = engines.scheduler_of(llm).kv_cache_manager.block_pool
        free = pool.get_num_free_blocks()
        outputs = engines.generate(llm, prompts)  # all in one step
        outcomes = engines.outcomes(outputs)
        assert pool.get_num_free_blocks() == free
    for prompt, output, outcome in zip(prompts, outputs, outcomes, strict=True):
        inputs = reference.inputs(prompt)
        assert inputs["input_ids"][0].tolist() == output.prompt_token_ids
        tokens, chosen = engines.chosen(output)
        if "multi_modal_data" not in prompt:
            assert outcome is None
            assert output.kv_transfer_params is None
            check(reference.log_probabilities(prompt, None, tokens), tokens, chosen)
            continue
        assert outcome is not None
        assert outcome.kept == kept_by_transformers(reference, inputs, get(method, **options))
        assert len(outcome.kept) < 0.7 * outcome.prompt
        check(reference.log_probabilities(prompt, outcome.kept, tokens), tokens, chosen)
        full = reference.log_probabilities(prompt, None, tokens)
        with pytest.raises(AssertionError):  # what was evicted matters
            check(full, tokens, chosen, 1e-2)
        assert output.kv_transfer_params["foveakv"] == {
            "method": method,
            "prompt_tokens": outcome.prompt,
            "stored_prompt_tokens": len(outcome.kept),
            "freed_blocks": (outcome.prompt - len(outcome.kept)) // 32,
        }


def kept_by_transformers(reference: Reference, inputs: Any, method: Any) -> list[int]:
    """The tokens that the same method keeps in the transformers engine."""
    cache = foveakv.cache_for(reference.model, method)
    reference.model(**inputs, past_key_values=cache, use_cache=True)
    return cache.kept(0)[0, 0].tolist()


def test_prompt_maps_are_those_of_transformers(checkpoints: Path) -> None:
    for name in tiny_checkpoints.BUILD:
        path = tiny_checkpoints.checkpoint(name, checkpoints)
        reference = Reference(path)
        prompts = [engines.prompt(name, count, seed=count) for count in (1, 2)]
        with engines.engine(path, "random") as llm:
            side = engines.connector_of(llm).scheduler
            maps: list[PromptMap] = []
            add = side.add

            def recorded(request: Any, add: Any = add, side: Any = side, maps: list[PromptMap] = maps) -> None:
                add(request)
                maps.append(side._known[request.request_id].prompt)

            side.add = recorded
            engines.generate(llm, prompts, 1)
        for prompt, found in zip(prompts, maps, strict=True):
            inputs = reference.inputs(prompt)
            types = inputs.get("mm_token_type_ids")
            expected = PromptMap.from_inputs(reference.model.config, inputs["input_ids"], mm_token_type_ids=types)
            assert found.kinds.equal(expected.kinds)
            assert found.index.equal(expected.index)

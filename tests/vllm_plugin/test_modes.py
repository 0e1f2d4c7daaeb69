"""How requests are decoded: streams, stop strings, structured output, log-probabilities, seeds and beams."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import engines
import pytest
import tiny_checkpoints
from dropped_reference import Reference, check
from vllm import SamplingParams
from vllm.sampling_params import BeamSearchParams, RequestOutputKind, StructuredOutputsParams

NAME = "tiny-llava"
HAE: dict[str, Any] = {"ddes": False, "target_visual_tokens": 0.25, "score_layer": 2}
GREEDY: dict[str, Any] = {"temperature": 0, "logprobs": 1}


@pytest.fixture(scope="module")
def path(checkpoints: Path) -> Path:
    return tiny_checkpoints.checkpoint(NAME, checkpoints)


@pytest.fixture(scope="module")
def reference(path: Path) -> Reference:
    return Reference(path)


@pytest.fixture(scope="module")
def llm(path: Path) -> Iterator[Any]:
    with engines.engine(path, "hae", HAE) as made:
        yield made


@pytest.fixture(autouse=True)
def _nothing_is_left(llm: Any) -> Iterator[None]:
    """Every test returns all blocks."""
    pool = engines.scheduler_of(llm).kv_cache_manager.block_pool
    free = pool.get_num_free_blocks()
    yield
    assert pool.get_num_free_blocks() == free


def kept() -> list[int]:
    """The prompt tokens that the last request keeps."""
    found: list[int] = engines.worker_side().recent[-1].kept
    return found


def same_log_probabilities(reference: Reference, prompt: Any, output: Any, n: int = 0) -> None:
    """Compare the log-probabilities of tokens that need not be the most probable ones."""
    tokens, chosen = engines.chosen(output, n)
    expected = reference.log_probabilities(prompt, kept(), tokens)
    found = [float(row[token]) for row, token in zip(expected, tokens, strict=True)]
    assert found == pytest.approx(chosen, abs=1e-4)


def test_a_stream_gives_the_tokens_one_by_one(llm: Any, reference: Reference) -> None:
    core, prompt = llm.llm_engine, engines.prompt(NAME, 2)
    params = SamplingParams(**GREEDY, max_tokens=10, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
    core.add_request("stream", prompt, params)
    tokens: list[int] = []
    chosen: list[float] = []
    steps, text = 0, ""
    while core.has_unfinished_requests():
        for output in core.step():
            part, found = engines.chosen(output)
            tokens, chosen, text, steps = tokens + part, chosen + found, text + output.outputs[0].text, steps + 1
    assert steps == 10
    check(reference.log_probabilities(prompt, kept(), tokens), tokens, chosen)
    (whole,) = engines.generate(llm, [prompt], 10)
    assert whole.outputs[0].text == text


def test_stop_strings_and_stop_tokens(llm: Any, reference: Reference) -> None:
    prompt, tokenizer = engines.prompt(NAME, 2), llm.get_tokenizer()
    letters = tokenizer.convert_tokens_to_ids(list("abcdefghijklmnop"))
    (whole,) = engines.generate(llm, [prompt], 16, allowed_token_ids=letters, presence_penalty=2.0)
    tokens, text = list(whole.outputs[0].token_ids), whole.outputs[0].text
    given: dict[str, Any] = {"allowed_token_ids": letters, "presence_penalty": 2.0}
    (stopped,) = engines.generate(llm, [prompt], 16, stop=[text[5:7]], **given)
    assert stopped.outputs[0].finish_reason == "stop"
    assert stopped.outputs[0].text == text[: text.index(text[5:7])]
    (stopped,) = engines.generate(llm, [prompt], 16, stop_token_ids=[tokens[3]], **given)
    assert list(stopped.outputs[0].token_ids) == tokens[: tokens.index(tokens[3]) + 1]
    assert stopped.kv_transfer_params["foveakv"]["freed_blocks"] > 0
    same_log_probabilities(reference, prompt, stopped)


STRUCTURES: dict[str, tuple[dict[str, Any], str]] = {
    "choice": ({"choice": ["a cat on a mat", "both images"]}, "a cat on a mat|both images"),
    "regex": ({"regex": "[a-c]{3}-[0-9]{2}"}, "[a-c]{3}-[0-9]{2}"),
    "json": (
        {"json": {"type": "object", "properties": {"n": {"type": "integer", "maximum": 9, "minimum": 0}},
                  "required": ["n"], "additionalProperties": False}},
        r'\{\s*"n"\s*:\s*[0-9]\s*\}',
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", STRUCTURES)
def test_structured_output(llm: Any, reference: Reference, kind: str) -> None:
    given, pattern = STRUCTURES[kind]
    prompt = engines.prompt(NAME, 2)
    structure = StructuredOutputsParams(**given, disable_any_whitespace=True)
    params = SamplingParams(temperature=0, logprobs=3, max_tokens=40, structured_outputs=structure)
    (output,) = llm.generate([prompt], params, use_tqdm=False)
    text = output.outputs[0].text
    assert re.fullmatch(pattern, text), text
    if kind == "json":
        assert set(json.loads(text)) == {"n"}
    assert output.kv_transfer_params["foveakv"]["freed_blocks"] > 0
    # vLLM normalizes over the tokens that the grammar allows, so only differences can be compared.
    tokens = list(output.outputs[0].token_ids)
    rows, compared = reference.log_probabilities(prompt, kept(), tokens), 0
    for row, token, step in zip(rows, tokens, output.outputs[0].logprobs, strict=True):
        for other, found in step.items():
            if math.isfinite(found.logprob) and found.logprob > -1e4:
                expected = float(row[other] - row[token])
                assert found.logprob - step[token].logprob == pytest.approx(expected, abs=1e-4)
                compared += other != token
    assert compared > 0


def test_log_probabilities_of_the_prompt(llm: Any, reference: Reference) -> None:
    """They are those of the whole prompt, since it is evicted after it has been read."""
    import torch

    prompt = engines.prompt(NAME, 2)
    (output,) = engines.generate(llm, [prompt], 6, prompt_logprobs=1, logprobs=5)
    assert all(len(step) >= 5 for step in output.outputs[0].logprobs)
    check(reference.log_probabilities(prompt, kept(), engines.chosen(output)[0]), *engines.chosen(output))
    inputs = reference.inputs(prompt)
    with torch.no_grad():
        logits = reference.model(**inputs).logits[0].float().log_softmax(-1)
    ids = inputs["input_ids"][0].tolist()
    assert output.prompt_logprobs[0] is None
    found = [step[token].logprob for step, token in zip(output.prompt_logprobs[1:], ids[1:], strict=True)]
    expected = [float(logits[i, token]) for i, token in enumerate(ids[1:])]
    assert found == pytest.approx(expected, abs=1e-4)


def test_samples_with_a_seed_are_repeatable(llm: Any, reference: Reference) -> None:
    prompt = engines.prompt(NAME, 3)
    given = {"temperature": 1.0, "top_p": 0.9, "seed": 7}
    outputs = [engines.generate(llm, [prompt], 12, **given)[0] for _ in range(2)]
    assert outputs[0].outputs[0].token_ids == outputs[1].outputs[0].token_ids
    same_log_probabilities(reference, prompt, outputs[0])
    (several,) = engines.generate(llm, [prompt], 12, **given, n=3)
    assert len({tuple(each.token_ids) for each in several.outputs}) > 1
    for n in range(3):
        same_log_probabilities(reference, prompt, several, n)


def test_penalties_and_forced_tokens(llm: Any, reference: Reference) -> None:
    prompt = engines.prompt(NAME, 1)
    (output,) = engines.generate(llm, [prompt], 12, allowed_token_ids=[70, 71, 72, 73], repetition_penalty=1.5)
    assert set(output.outputs[0].token_ids) <= {70, 71, 72, 73}
    same_log_probabilities(reference, prompt, output)


def test_beams_are_those_of_the_whole_prompt(llm: Any, reference: Reference) -> None:
    """vLLM reads the prompt and a beam again for every token, so beams never attend to an evicted prompt."""
    prompt = engines.prompt(NAME, 1)
    recent = list(engines.worker_side().recent)
    (output,) = llm.beam_search([prompt], BeamSearchParams(beam_width=2, max_tokens=6, ignore_eos=True))
    assert len(output.sequences) == 2
    for beam in output.sequences:
        tokens = beam.tokens[-6:]
        rows = reference.log_probabilities(prompt, None, tokens)
        assert sum(float(row[token]) for row, token in zip(rows, tokens, strict=True)) == pytest.approx(
            beam.cum_logprob, abs=1e-3
        )
    assert list(engines.worker_side().recent) == recent

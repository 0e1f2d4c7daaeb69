"""With vLLM's prefix caching: text and uncompressed requests share blocks, compressed ones never share wrong ones."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import engines
import pytest
import tiny_checkpoints
from dropped_reference import Reference, check
from vllm import SamplingParams

NAME = "tiny-llava"
HAE: dict[str, Any] = {"ddes": False, "target_visual_tokens": 0.25, "score_layer": 2}
LONG = "describe both images, and compare them in one sentence. " * 4
OFF: dict[str, Any] = {"foveakv": "off"}
HALF: dict[str, Any] = {"foveakv": {"method": "hae", "options": {**HAE, "target_visual_tokens": 0.5}}}


@pytest.fixture(scope="module")
def path(checkpoints: Path) -> Path:
    return tiny_checkpoints.checkpoint(NAME, checkpoints)


@pytest.fixture(scope="module")
def reference(path: Path) -> Reference:
    return Reference(path)


@pytest.fixture(scope="module")
def llm(path: Path) -> Iterator[Any]:
    with engines.engine(path, "hae", HAE, enable_prefix_caching=True) as made:
        yield made


@pytest.fixture(autouse=True)
def _afresh(llm: Any) -> None:
    """Every test starts with an empty prefix cache."""
    assert llm.llm_engine.reset_prefix_cache()


def hashed(llm: Any) -> int:
    """Number of hashes under which blocks can be found."""
    return len(engines.scheduler_of(llm).kv_cache_manager.block_pool.cached_block_hash_to_block)


def ask(llm: Any, reference: Reference, asked: list[tuple[Any, Any]]) -> list[Any]:
    """Send prompts with their `extra_args` together and compare the answers with transformers.

    Returns: (number of prompt tokens found in the prefix cache, tokens kept or None) for each.
    """
    given: dict[str, Any] = {"max_tokens": 40, "temperature": 0, "ignore_eos": True, "logprobs": 1}
    params = [SamplingParams(**given, extra_args=extra) for _, extra in asked]
    outputs = llm.generate([prompt for prompt, _ in asked], params, use_tqdm=False)
    found = []
    for (prompt, _), output, outcome in zip(asked, outputs, engines.outcomes(outputs), strict=True):
        tokens, chosen = engines.chosen(output)
        kept = None if outcome is None else outcome.kept
        check(reference.log_probabilities(prompt, kept, tokens), tokens, chosen)
        found.append((output.num_cached_tokens, kept))
    return found


def test_text_shares_its_prefix(llm: Any, reference: Reference) -> None:
    first, second = ({"prompt": LONG + end} for end in ("a cat", "a mat"))
    ((found, _),) = ask(llm, reference, [(first, None)])
    assert found == 0
    ((found, _),) = ask(llm, reference, [(second, None)])
    assert found >= 32


def test_uncompressed_images_share_their_prefix(llm: Any, reference: Reference) -> None:
    prompt, other = engines.prompt(NAME, 2), engines.prompt(NAME, 2, seed=5)
    assert ask(llm, reference, [(prompt, OFF)]) == [(0, None)]
    ((found, _),) = ask(llm, reference, [(prompt, OFF)])
    assert found > 150
    ((found, _),) = ask(llm, reference, [(other, OFF)])
    assert found == 0


def test_compressed_prompts_are_never_found(llm: Any, reference: Reference) -> None:
    """The same image twice, with another budget, another image with the same text, and uncompressed."""
    prompt, other = engines.prompt(NAME, 2), engines.prompt(NAME, 2, seed=5)
    ((found, kept),) = ask(llm, reference, [(prompt, None)])
    assert found == hashed(llm) == 0
    assert ask(llm, reference, [(prompt, None)]) == [(0, kept)]
    ((found, more),) = ask(llm, reference, [(prompt, HALF)])
    assert found == 0
    assert len(more) > len(kept)
    ((found, _),) = ask(llm, reference, [(other, None)])
    assert found == hashed(llm) == 0
    assert ask(llm, reference, [(prompt, OFF)]) == [(0, None)]


def test_compression_does_not_change_blocks_of_others(llm: Any, reference: Reference) -> None:
    """Uncompressed, compressed and uncompressed again: one after the other, and all in one step."""
    prompt, longer = engines.prompt(NAME, 2), engines.prompt(NAME, 2, text=LONG)
    ask(llm, reference, [(prompt, OFF)])
    ((found, kept),) = ask(llm, reference, [(prompt, None)])
    assert found == 0
    assert kept is not None
    ((found, _),) = ask(llm, reference, [(longer, OFF)])
    assert found > 150
    assert llm.llm_engine.reset_prefix_cache()
    for order in ([None, OFF, None, OFF], [OFF, None, OFF, HALF]):
        ask(llm, reference, [(prompt, extra) for extra in order])
        ask(llm, reference, [(longer, extra) for extra in order])


def test_one_token_requests_share_their_prefix(llm: Any, reference: Reference) -> None:
    """They are not compressed, so what beam search reads again is found."""
    prompt = engines.prompt(NAME, 2)
    for least in (0, 150):
        (output,) = engines.generate(llm, [prompt], 1)
        tokens, chosen = engines.chosen(output)
        check(reference.log_probabilities(prompt, None, tokens), tokens, chosen)
        assert output.num_cached_tokens >= least


def test_refused_requests_leave_nothing(llm: Any) -> None:
    prompt = engines.prompt(NAME, 2)
    (output,) = engines.generate(llm, [prompt], 4, extra_args={"foveakv": {"method": "snapkv"}})
    assert output.outputs[0].finish_reason == "error"
    assert hashed(llm) == 0
    assert engines.scheduler_of(llm).requests == {}


def test_freed_blocks_are_reused_before_those_that_can_be_found(llm: Any) -> None:
    core, pool = llm.llm_engine, engines.scheduler_of(llm).kv_cache_manager.block_pool
    core.add_request("a", engines.prompt(NAME, 3), SamplingParams(max_tokens=80, temperature=0, ignore_eos=True))
    core.step()
    assert engines.worker_side().recent[-1].freed
    assert all(block.block_hash is None for block in pool.blocks if block.ref_cnt == 0)
    while core.has_unfinished_requests():
        core.step()
    assert hashed(llm) == 0

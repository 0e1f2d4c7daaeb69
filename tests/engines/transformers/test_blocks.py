"""Later turns are compressed like the first one: every pass equals a full cache masked to what was stored before it."""

from __future__ import annotations

from typing import Any

import families
import matrix
import pytest
import second_passes
import talks
import torch

pytestmark = pytest.mark.usefixtures("no_gradients")


@pytest.mark.parametrize("talk", talks.TURNS)
@pytest.mark.parametrize("name", matrix.METHODS)
@pytest.mark.parametrize("family", talks.FAMILIES)
def test_turns(family: str, name: str, talk: str) -> None:
    model = matrix.model(family, torch.float64)
    method = matrix.method(name)
    if method.visual_only and family in families.TEXT:
        pytest.skip("evicts visual tokens only")
    if second_passes.refused(family, name):
        pytest.skip("refused, see test_families.py")

    def say(session: Any) -> None:
        talks.converse(family, model, talks.TURNS[talk])

    talks.check(model, talks.compressed(model, method, say), say)


@pytest.mark.parametrize("chunk", [1, 7, 64])
@pytest.mark.parametrize("name", matrix.METHODS)
def test_chunks_that_are_compressed_one_by_one(name: str, chunk: int) -> None:
    """A prompt of 80 tokens: every chunk attends to what is stored of those before it."""
    model, ids = matrix.model("llama", torch.float64), torch.tensor([families.words(80, 3)])
    method = matrix.method(name)
    if method.visual_only or method.further == "keep":
        pytest.skip("needs images, or the prompt as a whole")

    def say(session: Any) -> None:
        model.generate(input_ids=ids, **{**matrix.GREEDY, "max_new_tokens": 2}, prefill_chunk_size=chunk)

    talk = talks.compressed(model, method, say, chunks="compress")
    talks.check(model, talk, say)
    assert [block.kind for block in talk.cache.blocks] == ["prompt"] + ["chunk"] * (-(-80 // chunk) - 1)


VARIANTS = [*matrix.VARIANTS, ("fastv", {"drop_hidden_states": True})]


@pytest.mark.parametrize(("name", "options"), VARIANTS, ids=[f"{name}-{i}" for i, (name, _) in enumerate(VARIANTS)])
def test_turns_with_other_options(name: str, options: dict[str, Any]) -> None:
    model = matrix.model("llava", torch.float64)

    def say(session: Any) -> None:
        talks.converse("llava", model, (True, False))

    talks.check(model, talks.compressed(model, matrix.method(name, **options), say), say)


@pytest.mark.parametrize("name", ["hybridkv", "quest", "snapkv"])
def test_turns_in_single_precision(name: str) -> None:
    """Kernels that read chunks in place, and compiled sums of attention, where the machine has them."""
    model = matrix.model("llava", torch.float32)

    def say(session: Any) -> None:
        talks.converse("llava", model, (True, True), dtype=torch.float32)

    talks.check(model, talks.compressed(model, matrix.method(name), say), say, tolerance=2e-4)

"""A prompt in chunks, by `generate` and by hand: compressed once, after the last chunk."""

from __future__ import annotations

from typing import Any

import families
import matrix
import pytest
import second_passes
import torch
from masked_reference import largest_difference
from modes import METHODS, inputs_of

import foveakv
from foveakv import errors

pytestmark = pytest.mark.usefixtures("no_gradients")

WHOLE = [name for name in matrix.METHODS if name not in ("random", "fastv", "mustdrop")]
WHOLE = [name for name in WHOLE if not second_passes.in_one_pass(name)]


@pytest.mark.parametrize("chunk", [7, 16, 1000])
@pytest.mark.parametrize("name", WHOLE)
def test_chunked_prefill(name: str, chunk: int) -> None:
    model, inputs = matrix.model("llama", torch.float64), inputs_of("llama")
    whole = matrix.compressed(model, matrix.method(name), inputs)
    run = matrix.compressed(model, matrix.method(name), inputs, prefill_chunk_size=chunk)
    assert len(run.trace) == len(whole.trace) + -(-inputs["input_ids"].shape[1] // chunk) - 1
    for layer in run.cache.compressed:
        assert torch.equal(run.cache.kept(layer.layer_idx), whole.cache.kept(layer.layer_idx))
    steps = matrix.GREEDY["max_new_tokens"]
    assert largest_difference([step[:, -1:] for step in run.logits[-steps:]], whole.logits) < 1e-6


@pytest.mark.skipif(families.IMAGES_IN_CHUNKS, reason="this transformers keeps the images of a prefill in chunks")
def test_chunked_prefill_that_would_lose_images_is_refused() -> None:
    with pytest.raises(errors.UnsupportedModeError, match="loses pixel_values"):
        matrix.compressed(
            matrix.model("llava", torch.float64), matrix.method("snapkv"), inputs_of("llava"), prefill_chunk_size=16
        )


@families.images_in_chunks
@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("family", ["qwen2_5_vl", "llava", "gemma3"])
def test_chunked_prefill_with_images(family: str, name: str) -> None:
    model, inputs = matrix.model(family, torch.float64), inputs_of(family)
    run = matrix.compressed(model, matrix.method(name), inputs, prefill_chunk_size=16)
    if family == "gemma3":  # a chunk may cut through an image, whose tokens would see each other in one piece
        matrix.check_against_reference(model, run, inputs, prefill_chunk_size=16)
        return
    whole = matrix.compressed(model, matrix.method(name), inputs)
    for layer in run.cache.compressed:
        assert torch.equal(run.cache.kept(layer.layer_idx), whole.cache.kept(layer.layer_idx))
    steps = matrix.GREEDY["max_new_tokens"]
    assert largest_difference([step[:, -1:] for step in run.logits[-steps:]], whole.logits) < 1e-6


@pytest.mark.parametrize("name", METHODS)
def test_a_prompt_in_pieces_by_hand(name: str) -> None:
    """`session.chunked_prefill(tokens)`: nothing is compressed before the whole prompt is in."""
    model, argument = matrix.model("llama", torch.float64), matrix.cache_argument("llama")
    ids = families.prompt("llama")["input_ids"]
    with foveakv.compress(model, matrix.method(name)) as session:
        want = [model(input_ids=ids, use_cache=True)]
        want.append(model(input_ids=torch.tensor([[11]]), **{argument: matrix.cache_of(want[0])}))
        kept = session.kept(2)
        pieces: dict[str, Any] = {}
        with session.chunked_prefill(ids.shape[1]):
            for piece in ids.split(13, 1):
                output = model(input_ids=piece, use_cache=True, **pieces)
                pieces = {argument: matrix.cache_of(output)}
        last = model(input_ids=torch.tensor([[11]]), **pieces)
        assert torch.equal(session.kept(2), kept)
    assert largest_difference([output.logits[:, -1:], last.logits], [w.logits[:, -1:] for w in want]) < 1e-6


def test_another_cache_decodes_between_the_pieces() -> None:
    """Its tokens are no blocks, though its context is shorter than the prompt that is read."""
    model, argument = matrix.model("llama", torch.float64), matrix.cache_argument("llama")
    ids, token = families.prompt("llama")["input_ids"], torch.tensor([[11]])
    other = foveakv.cache_for(model, matrix.method("snapkv"))
    model(input_ids=ids[:, :20], **{argument: other})
    pieces: dict[str, Any] = {}
    with foveakv.compress(model, matrix.method("snapkv")) as session, session.chunked_prefill(ids.shape[1]):
        for piece in ids.split(13, 1):
            pieces = {argument: matrix.cache_of(model(input_ids=piece, use_cache=True, **pieces))}
            model(input_ids=token, **{argument: other})
    assert [block.kind for block in other.blocks] == ["prompt"]
    assert [block.kind for block in session.cache.blocks] == ["prompt"]

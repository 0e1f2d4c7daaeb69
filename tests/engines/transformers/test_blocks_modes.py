"""Further blocks in batches with padding, with beams after them, with drafts, and in loops of one's own."""

from __future__ import annotations

from typing import Any

import families
import matrix
import pytest
import second_passes
import talks
import torch
from modes import inputs_of

import foveakv
from foveakv import errors

pytestmark = pytest.mark.usefixtures("no_gradients")

CONTEXT = [name for name in matrix.METHODS if name not in ("full", "quest")]


@pytest.mark.parametrize("name", matrix.METHODS)
def test_padding_inside_blocks(name: str) -> None:
    """Rows whose new words differ in number, with padding before and inside; one row ends early."""
    model, inputs = matrix.model("llava", torch.float64), inputs_of("llava")
    words = torch.tensor([[0, 0, 0, 31, 32], [41, 42, 43, 44, 45], [0, 51, 0, 52, 53]])

    def say(session: Any) -> None:
        given, cache = dict(inputs), {}
        for new in (words, words.roll(1, 0), None):
            output = model.generate(**given, **matrix.GREEDY, **cache)
            if new is not None:
                cache = {matrix.cache_argument("llava"): matrix.cache_of(output)}
                answered = output.sequences.shape[1] - given["attention_mask"].shape[1]
                ended = torch.ones(3, answered)
                ended[2, -2:] = 0  # the caller masks what an ended row was filled up with
                mask = torch.cat([given["attention_mask"], ended, new != 0], 1).long()
                given = {"input_ids": torch.cat([output.sequences, new], 1), "attention_mask": mask}

    talk = talks.compressed(model, matrix.method(name), say)
    talks.check(model, talk, say, rows="last")


@families.images_in_chunks
@pytest.mark.parametrize("chunk", [7, 30])
@pytest.mark.parametrize("name", CONTEXT)
def test_a_padded_batch_in_chunks(name: str, chunk: int) -> None:
    """The first chunks of a row may be padding only, and an image may lie in two chunks."""
    model, inputs = matrix.model("llava", torch.float64), inputs_of("llava")
    method = matrix.method(name)
    if method.prunes_after is not None or method.observes.second_pass:
        pytest.skip("needs the prompt as a whole")

    def say(session: Any) -> None:
        model.generate(**inputs, **matrix.GREEDY, prefill_chunk_size=chunk)

    talk = talks.compressed(model, method, say, chunks="compress")
    talks.check(model, talk, say, rows="last")
    assert len(talk.cache.blocks) == -(-inputs["input_ids"].shape[1] // chunk)


@pytest.mark.parametrize("name", matrix.METHODS)
def test_beams_after_the_last_block(name: str) -> None:
    model = matrix.model("llava", torch.float64)
    inputs = families.prompt("llava", dtype=torch.float64)
    new = torch.tensor([families.words(9, 4)])

    def say(session: Any) -> None:
        output = model.generate(**inputs, **matrix.GREEDY)
        cache = matrix.cache_of(output)
        ids = torch.cat([output.sequences, new], 1)
        output = model.generate(input_ids=ids, **matrix.GREEDY, **{matrix.cache_argument("llava"): cache})
        cache.batch_repeat_interleave(3)
        ids = torch.cat([output.sequences, new.flip(1)], 1)
        given = {"input_ids": ids, matrix.cache_argument("llava"): cache}
        model.generate(**given, **matrix.GREEDY, num_beams=3)

    talk = talks.compressed(model, matrix.method(name), say)
    talks.check(model, talk, say)


def test_drafts_with_a_later_turn_are_refused_where_the_context_would_be_read_twice() -> None:
    model, first = matrix.model("llama", torch.float64), families.prompt("llama", dtype=torch.float64)
    with foveakv.compress(model, matrix.method("snapkv")) as session:
        output = model.generate(**first, **matrix.GREEDY)
        ids = torch.cat([output.sequences, output.sequences[:, 2:12]], 1)
        given = {"input_ids": ids, matrix.cache_argument("llama"): session.cache, **matrix.GREEDY}
        seen = session.cache.seen
        try:
            model.generate(**given, prompt_lookup_num_tokens=3)
        except errors.UnsupportedModeError as error:
            assert "reads the whole context again" in str(error)  # noqa: PT017, another transformers may not
            assert session.cache.seen == seen
        else:
            assert [block.kind for block in session.cache.blocks] == ["prompt", "turn"]


@pytest.mark.parametrize("name", CONTEXT)
@pytest.mark.parametrize("family", ["qwen2_5_vl", "gemma3"])
def test_loops_by_hand(family: str, name: str) -> None:
    """Passes of `model(...)` over several tokens are blocks, those over one token are decode steps."""
    if second_passes.refused(family, name):
        pytest.skip("refused, see test_families.py")
    model, inputs = matrix.model(family, torch.float64), families.prompt(family, dtype=torch.float64)
    argument = matrix.cache_argument(family)

    def say(session: Any) -> None:
        cache = matrix.cache_of(model(**inputs, use_cache=True))
        for step in ([11, 12, 13], [14], [15], [16, 17]):
            model(input_ids=torch.tensor([step]), **{argument: cache})

    talk = talks.compressed(model, matrix.method(name), say)
    talks.check(model, talk, say)
    assert [block.kind for block in talk.cache.blocks] == ["prompt", "turn", "turn"]


def test_chunks_in_a_loop_by_hand() -> None:
    model, argument = matrix.model("llama", torch.float64), matrix.cache_argument("llama")
    ids = torch.tensor([families.words(60, 0)])

    def say(session: Any) -> None:
        cache: dict[str, Any] = {}
        for piece in (*ids.split([20, 20, 1, 19], 1), torch.tensor([[11]])):
            cache = {argument: matrix.cache_of(model(input_ids=piece, use_cache=True, **cache))}

    def in_chunks(session: Any) -> None:
        with session.chunked_prefill(60):
            say(session)

    talk = talks.compressed(model, matrix.method("snapkv"), in_chunks, chunks="compress")
    talks.check(model, talk, say)
    assert [block.kind for block in talk.cache.blocks] == ["prompt", "chunk", "chunk", "chunk"]

"""Conversations of several turns over one cache, and several continuations of one prompt."""

from __future__ import annotations

import copy
from typing import Any

import families
import matrix
import pytest
import torch
from masked_reference import largest_difference, masked, recorded
from modes import FAMILIES, FAMILY_AND_METHOD, METHODS, inputs_of

import foveakv

pytestmark = pytest.mark.usefixtures("no_gradients")


def converse(
    family: str, model: Any, images: tuple[bool, ...], cache: Any = None
) -> tuple[list[families.Turn], list[Any]]:
    """Turns over one cache, with or without a new image each; for every turn its inputs and what it gave."""
    rows = [families.row(family, images=2), families.row(family, images=1, seed=1)]
    turn = families.first_turn(family, rows, torch.float64)
    turns, outputs = [turn], []
    for step, image in enumerate([*images, None]):
        past = {} if cache is None else {"past_key_values": cache}
        output = model.generate(**turn.inputs, **matrix.GREEDY, **past)
        outputs.append(output)
        cache = matrix.cache_of(output)
        if image is not None:
            turn = families.next_turn(family, model, turn, output.sequences, image=image, seed=step)
            turns.append(turn)
    return turns, outputs


TURNS = {"text-image": (False, True), "image-text": (True, False), "text-text": (False, False)}
TALKS = [(f, n, t) for f in FAMILIES for n in METHODS for t in TURNS if (t == "text-text") == (f in families.TEXT)]


@pytest.mark.parametrize(("family", "name", "talk"), TALKS)
def test_second_and_third_turn(family: str, name: str, talk: str) -> None:
    """The documented way: `generate` with all ids and the cache of the turn before."""
    model = matrix.model(family, torch.float64)
    with foveakv.compress(model, matrix.method(name), trace=True) as session, recorded(model) as got:
        turns, outputs = converse(family, model, TURNS[talk])
        trace = list(session.trace)
        assert session.cache is matrix.cache_of(outputs[-1])
        assert session.report.tokens_seen == outputs[-1].sequences.shape[1] - 1
    cache = None
    with masked(model, trace), recorded(model) as want:
        for turn, output in zip(turns, outputs, strict=True):
            past = {} if cache is None else {"past_key_values": cache}
            replay = model.generate(**turn.inputs, **matrix.GREEDY, **past)
            assert torch.equal(replay.sequences, output.sequences)
            cache = matrix.cache_of(replay)
    assert largest_difference(got, want) < 1e-6


@pytest.mark.parametrize("family", FAMILIES)
def test_a_cache_of_ones_own(family: str) -> None:
    """`cache_for` works without a `with` block, turn after turn, and keeps what `compress` keeps."""
    model = matrix.model(family, torch.float64)
    images = (family not in families.TEXT, False)
    with foveakv.compress(model, matrix.method("snapkv")) as session, recorded(model) as want:
        converse(family, model, images)
        kept = [session.kept(layer.layer_idx) for layer in session.cache.compressed]
    cache = foveakv.cache_for(model, matrix.method("snapkv"))
    with recorded(model) as got:
        converse(family, model, images, cache)
    assert largest_difference(got, want) < 1e-9
    assert all(torch.equal(a, cache.kept(layer.layer_idx)) for a, layer in zip(kept, cache.compressed, strict=True))


@FAMILY_AND_METHOD
def test_padding_between_turns(family: str, name: str) -> None:
    """Rows whose new words differ in number are padded in the middle of the context."""
    model, inputs = matrix.model(family, torch.float64), inputs_of(family)
    words = torch.tensor([[0, 0, 0, 31, 32], [41, 42, 43, 44, 45], [0, 0, 0, 0, 51]])

    def talk() -> list[torch.Tensor]:
        answers, given, cache = [], dict(inputs), {}
        for new in (words, words[:, 2:], None):
            output = model.generate(**given, **matrix.GREEDY, **cache)
            answers.append(output.sequences)
            if new is not None:
                cache = {"past_key_values": matrix.cache_of(output)}
                ids = torch.cat([output.sequences, new], 1)
                answered = output.sequences.shape[1] - given["attention_mask"].shape[1]
                mask = torch.cat([given["attention_mask"], torch.ones(3, answered), new != 0], 1).long()
                given = {"input_ids": ids, "attention_mask": mask} | families.token_types(family, ids)
        return answers

    with foveakv.compress(model, matrix.method(name), trace=True) as session, recorded(model) as got:
        tokens = talk()
        trace = list(session.trace)
    with masked(model, trace), recorded(model) as want:
        assert all(torch.equal(a, b) for a, b in zip(talk(), tokens, strict=True))
    assert max((a[:, -1] - b[:, -1]).abs().max().item() for a, b in zip(got, want, strict=True)) < 1e-6


def second_turn(model: Any, output: Any, cache: Any, skip: int = 0) -> list[torch.Tensor]:
    """Logits of a turn of three more words after `output`, of whose ids the first `skip` are left out."""
    ids = torch.cat([output.sequences, torch.tensor([[31, 32, 33]])], 1)
    inputs = {"input_ids": ids[:, skip:], "attention_mask": torch.ones_like(ids)}
    return matrix.plain(model, inputs, past_key_values=cache).logits


@pytest.mark.parametrize("name", METHODS)
def test_only_the_new_tokens_of_a_turn(name: str) -> None:
    """With the mask of the whole context beside them, as transformers allows."""
    model, inputs, logits = matrix.model("llava", torch.float64), families.prompt("llava", dtype=torch.float64), []
    with foveakv.compress(model, matrix.method(name)):
        for skip in (False, True):
            output = model.generate(**inputs, **matrix.GREEDY)
            cache = matrix.cache_of(output)
            logits.append(second_turn(model, output, cache, cache.get_seq_length() if skip else 0))
    assert largest_difference(*logits) < 1e-9


@pytest.mark.parametrize("name", METHODS)
def test_copies_of_a_cache(name: str) -> None:
    """One prompt, several continuations: each on its own deep copy, as transformers documents it."""
    model, inputs = matrix.model("llava", torch.float64), families.prompt("llava", dtype=torch.float64)
    with foveakv.compress(model, matrix.method(name)):
        output = model.generate(**inputs, **matrix.GREEDY)
        cache = matrix.cache_of(output)
        copies = [copy.deepcopy(cache) for _ in range(2)]
        want = second_turn(model, output, cache)
        for copied in copies:
            assert largest_difference(second_turn(model, output, copied), want) < 1e-9

"""Every method in every mode that it supports, on two families: turns with images, beams, prompts in chunks."""

from __future__ import annotations

from typing import Any

import families
import matrix
import pytest
import second_passes
import torch
import witness
from masked_reference import largest_difference, masked, recorded

import foveakv
from foveakv import errors

pytestmark = pytest.mark.usefixtures("no_gradients")

FAMILIES = ["qwen2_5_vl", "llava"]
every = pytest.mark.parametrize("name", matrix.METHODS)
family_names = pytest.mark.parametrize("family", FAMILIES)


def setting(family: str) -> tuple[Any, dict[str, Any]]:
    return matrix.model(family, torch.float64), families.batch(family, dtype=torch.float64).inputs


@every
@family_names
def test_beams(family: str, name: str) -> None:
    model, inputs = setting(family)
    run = matrix.compressed(model, matrix.method(name), inputs, num_beams=3)
    matrix.check_against_reference(model, run, inputs, num_beams=3)
    matrix.check_storage(run)


@families.images_in_chunks
@every
@family_names
def test_prompts_in_chunks(family: str, name: str) -> None:
    """What is kept is what is kept of the prompt at once, and so are the logits."""
    model, inputs = setting(family)
    whole = matrix.compressed(model, matrix.method(name), inputs)
    if second_passes.in_one_pass(name):
        with pytest.raises(errors.UnsupportedModeError, match="whole prompt in one forward pass"):
            matrix.compressed(model, matrix.method(name), inputs, prefill_chunk_size=16)
        return
    run = matrix.compressed(model, matrix.method(name), inputs, follow=whole, prefill_chunk_size=16)
    witness.check(run.trace, run.stored)
    for layer in run.cache.compressed:
        assert torch.equal(run.cache.kept(layer.layer_idx), whole.cache.kept(layer.layer_idx))
    steps = matrix.GREEDY["max_new_tokens"]
    assert largest_difference([step[:, -1:] for step in run.logits[-steps:]], whole.logits) < 1e-6
    if not run.cache.method.merges:
        matrix.check_against_reference(model, run, inputs, prefill_chunk_size=16)


def talk(family: str, model: Any, first: families.Turn, images: tuple[bool, ...]) -> list[torch.Tensor]:
    """Turns over one cache, each with or without a new image."""
    turn, cache, answers = first, {}, []
    for number, image in enumerate((*images, None)):
        output = model.generate(**turn.inputs, **{**matrix.GREEDY, "max_new_tokens": 4}, **cache)
        answers.append(output.sequences)
        if image is not None:
            cache = {"past_key_values": matrix.cache_of(output)}
            turn = families.next_turn(family, model, turn, output.sequences, image=image, seed=number)
    return answers


@pytest.mark.parametrize("images", [(True, False), (False, True)], ids=["image-text", "text-image"])
@every
@family_names
def test_second_and_third_turn(family: str, name: str, images: tuple[bool, ...]) -> None:
    model, method = matrix.model(family, torch.float64), matrix.method(name)
    rows = [families.row(family, images=2), families.row(family, images=1, seed=1)]
    first = families.first_turn(family, rows, torch.float64)
    with (
        witness.witnessed() as seen,
        foveakv.compress(model, method, trace=True) as session,
        recorded(model) as got,
    ):
        tokens = talk(family, model, first, images)
        trace, stored = list(session.trace), seen.of(session.cache)
    witness.check(trace, stored)
    assert session.report.tokens_seen == tokens[-1].shape[1] - 1
    if method.merges:
        return  # `test_merging` has the reference of merged slots
    with masked(model, trace, stored=stored) as replay, recorded(model) as want:
        assert all(torch.equal(*pair) for pair in zip(talk(family, model, first, images), tokens, strict=True))
    assert largest_difference(got, want) < 1e-6
    assert replay.furthest < 1e-6


@every
@family_names
def test_a_stored_prompt_is_the_plain_caches_bit_by_bit(family: str, name: str) -> None:
    """Keys and values of the prompt as attention is handed them, at the positions that the trace has."""
    model, inputs = setting(family)
    run = matrix.compressed(model, matrix.method(name), inputs, max_new_tokens=3)
    witness.check(run.trace, run.stored)
    if run.cache.method.merges:
        pytest.skip("merged slots hold numbers of their own")
    cache, columns = matrix.plain(model, inputs, max_new_tokens=1).cache, inputs["input_ids"].shape[1]
    for step in run.stored[1:]:
        for layer, (positions, keys, values) in step.items():
            assert keys is not None
            assert values is not None
            inside = (positions >= 0) & (positions < columns)
            for stored, plain in ((keys, cache.layers[layer].keys), (values, cache.layers[layer].values)):
                index = positions.clamp(0, columns - 1)[..., None].expand_as(stored)
                assert torch.equal(plain.gather(2, index)[inside], stored[inside])

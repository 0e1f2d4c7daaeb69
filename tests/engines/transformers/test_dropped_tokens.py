"""Tokens that leave the residual stream, with prompts that end in a visual token: the last token always stays."""

from __future__ import annotations

from typing import Any

import families
import matrix
import pytest
import torch
import witness
from families import Picture, Row
from masked_reference import largest_difference, masked, recorded

import foveakv

pytestmark = pytest.mark.usefixtures("no_gradients")

ENDS_IN_AN_IMAGE = ["llava", "llava_next", "phi4_multimodal"]  # no token of text closes an image
FAMILIES = [*ENDS_IN_AN_IMAGE, "qwen2_5_vl"]
DROPPING: dict[str, tuple[str, dict[str, Any]]] = {
    "hae": ("hae", {"target_visual_tokens": 0.25, "drop_hidden_states": True, "budget": None}),
    "hae-budget": ("hae", {"target_visual_tokens": 0.25, "drop_hidden_states": True, "budget": 0.4}),
    "hae-dap": ("hae", {"target_visual_tokens": 2, "drop_hidden_states": True, "ddes": False, "budget": None}),
    "fastv": ("fastv", {"layer": 1, "ratio": 0.75, "drop_hidden_states": True}),
}
dropping = pytest.mark.parametrize("how", DROPPING)
family_names = pytest.mark.parametrize("family", FAMILIES)


def method(how: str) -> Any:
    name, options = DROPPING[how]
    return matrix.method(name, **options)


def rows(family: str, how: str) -> list[Row]:
    """Rows of different lengths. They end in an image, but for HAE, which judges no image that no text comes after."""
    size = families.FAMILIES[family].sizes - 1
    end = (2,) if how.startswith("hae") else ()
    return [
        Row((3, Picture(0, 1), *end)),
        Row((2, Picture(size, 2), 9), 1),
        Row((4, Picture(size, 3), 5, Picture(0, 4), *end), 2),
    ]


def check_stream(stayed: torch.Tensor | None, mask: torch.Tensor) -> None:
    """Tokens left the stream in every row, and the last real one of no row."""
    assert stayed is not None
    last = (mask * torch.arange(1, mask.shape[1] + 1)).argmax(1, keepdim=True)
    assert bool(stayed.gather(1, last).all())
    assert bool(((mask == 1) & ~stayed).any(1).all())


def check_logits(logits: list[torch.Tensor]) -> None:
    for step in logits:
        assert bool(step[:, -1].isfinite().all())
        assert bool((step[:, -1].abs().amax(-1) > 0).all())


@dropping
@pytest.mark.parametrize("alone", [0, 2, None], ids=["row 0", "row 2", "batch"])
@family_names
def test_rows_and_batches(family: str, alone: int | None, how: str) -> None:
    model, every = matrix.model(family, torch.float64), rows(family, how)
    inputs = families.encode(family, every if alone is None else [every[alone]], torch.float64)
    run = matrix.compressed(model, method(how), inputs)
    check_logits(run.logits)
    check_stream(run.stayed, inputs["attention_mask"])
    matrix.check_against_reference(model, run, inputs)
    matrix.check_storage(run)


@dropping
@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl"])
def test_beams(family: str, how: str) -> None:
    model, inputs = matrix.model(family, torch.float64), families.encode(family, rows(family, how), torch.float64)
    run = matrix.compressed(model, method(how), inputs, num_beams=3)
    check_logits(run.logits)
    check_stream(run.stayed, inputs["attention_mask"].repeat_interleave(3, 0))
    matrix.check_against_reference(model, run, inputs, num_beams=3)


def test_four_words_and_an_image() -> None:
    """The shortest prompt of the kind."""
    model = matrix.model("llava", torch.float64)
    inputs = families.encode("llava", [Row((Picture(),))], torch.float64)
    inputs["input_ids"] = torch.tensor([[1, 20, 21, 22, *[families.IMAGE] * 16]])
    inputs["attention_mask"] = torch.ones(1, 20, dtype=torch.long)
    run = matrix.compressed(model, method("fastv"), inputs)
    check_logits(run.logits)
    check_stream(run.stayed, inputs["attention_mask"])
    matrix.check_against_reference(model, run, inputs)
    judged = foveakv.HAE(target_visual_tokens=0.25, drop_hidden_states=True, ddes=False, budget=None)
    run = matrix.compressed(model, judged, inputs)
    assert run.session.report.evicted == 0  # no text comes after the image
    matrix.check_against_reference(model, run, inputs)


@dropping
def test_right_padding(how: str) -> None:
    """Through `model(...)`: the last real token of a row stands before its padding."""
    model = matrix.model("llava", torch.float64)
    inputs = families.encode("llava", rows("llava", how), torch.float64)
    lengths = inputs["attention_mask"].sum(1)
    for name in ("input_ids", "attention_mask"):
        inputs[name] = torch.stack([row.roll(int(n)) for row, n in zip(inputs[name], lengths, strict=True)])
    mask, last = inputs["attention_mask"], lengths - 1
    argument = matrix.cache_argument("llava")

    def loop() -> list[torch.Tensor]:
        places = (mask.cumsum(1) - 1).clamp_min(0)
        output = model(**inputs, position_ids=places, use_cache=True)
        found, grown = [output.logits[torch.arange(len(mask)), last][:, None]], mask
        for step, token in enumerate((31, 32, 33)):
            grown = torch.nn.functional.pad(grown, (0, 1), value=1)
            output = model(
                input_ids=torch.full((len(mask), 1), token), attention_mask=grown, use_cache=True,
                position_ids=(lengths + step)[:, None], **{argument: matrix.cache_of(output)},
            )  # fmt: skip
            found.append(output.logits)
        return found

    with witness.witnessed() as seen, foveakv.compress(model, method(how), trace=True) as session:
        got = loop()
        trace, stored = list(session.trace), seen.of(session.cache)
        stayed = seen.streams.get(id(session.cache))
        after = session.cache.compressed[session.cache.method.prunes_after].layer_idx
    check_logits(got)
    check_stream(stayed, mask)
    witness.check(trace, stored)
    with masked(model, trace, left=stayed, left_after=after, stored=stored) as replay:
        want = loop()
    assert largest_difference(got, want) < 1e-6
    assert replay.compared > 0
    assert replay.furthest < 1e-6


@dropping
@family_names
def test_later_turns(family: str, how: str) -> None:
    """The second turn brings a new image, the third words."""
    model = matrix.model(family, torch.float64)
    first = families.first_turn(family, rows(family, how)[:2], torch.float64)

    def talk() -> list[torch.Tensor]:
        turn, cache, answers = first, {}, []
        for number, image in enumerate((True, False, None)):
            output = model.generate(**turn.inputs, **matrix.GREEDY, **cache)
            answers.append(output.sequences)
            if image is not None:
                cache = {"past_key_values": matrix.cache_of(output)}
                turn = families.next_turn(family, model, turn, output.sequences, image=image, seed=number)
        return answers

    with (
        witness.witnessed() as seen,
        foveakv.compress(model, method(how), trace=True) as session,
        recorded(model) as got,
    ):
        tokens = talk()
        trace, stored = list(session.trace), seen.of(session.cache)
        stayed, after = seen.streams[id(session.cache)], session.cache.method.prunes_after
        after = session.cache.compressed[after].layer_idx
    check_logits(got)
    check_stream(stayed, first.inputs["attention_mask"])
    witness.check(trace, stored)
    with masked(model, trace, left=stayed, left_after=after, stored=stored) as replay, recorded(model) as want:
        assert all(torch.equal(*pair) for pair in zip(talk(), tokens, strict=True))
    assert largest_difference(got, want) < 1e-6
    assert replay.furthest < 1e-6

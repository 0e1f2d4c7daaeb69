"""Beam search, sampling, penalties, rows that end early, and streaming."""

from __future__ import annotations

from typing import Any

import families
import matrix
import pytest
import torch
import transformers
from masked_reference import largest_difference
from modes import FAMILIES, FAMILY_AND_METHOD, METHODS, inputs_of

import foveakv

pytestmark = pytest.mark.usefixtures("no_gradients")


@FAMILY_AND_METHOD
def test_beams(family: str, name: str) -> None:
    model, inputs = matrix.model(family, torch.float64), inputs_of(family)
    run = matrix.compressed(model, matrix.method(name), inputs, num_beams=3)
    matrix.check_against_reference(model, run, inputs, num_beams=3)
    matrix.check_storage(run)


def test_beams_change_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above tests something: beams are reordered, and not by the identity."""
    orders = []
    original = foveakv.CompressedCache.reorder_cache

    def reorder(self: Any, beam_idx: torch.Tensor) -> None:
        orders.append(beam_idx.tolist())
        original(self, beam_idx)

    monkeypatch.setattr(foveakv.CompressedCache, "reorder_cache", reorder)
    matrix.compressed(
        matrix.model("qwen2_5_vl"), matrix.method("hae"), inputs_of("qwen2_5_vl", torch.float32), num_beams=3
    )
    assert any(order != sorted(order) or len(set(order)) < len(order) for order in orders)


@pytest.mark.parametrize("family", FAMILIES)
def test_beams_and_sampling_of_the_full_method_are_the_plain_models(family: str) -> None:
    """Two runs that choose and draw for themselves, in fp64, where no near tie can part them."""
    model, inputs = matrix.model(family, torch.float64), inputs_of(family)
    for options in (
        {"num_beams": 3, "num_return_sequences": 2},
        {"do_sample": True, "temperature": 1.3, "top_k": 20},
        {"do_sample": True, "num_return_sequences": 3},
        {"do_sample": True, "num_beams": 2},
    ):
        want = matrix.plain(model, inputs, **options)
        got = matrix.compressed(model, foveakv.methods.get("full"), inputs, **options)
        assert torch.equal(got.tokens, want.tokens), options
        assert largest_difference(got.logits, want.logits) < 1e-9


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize(
    "options",
    [
        {"do_sample": True, "temperature": 1.3, "top_p": 0.9},
        {"do_sample": True, "num_return_sequences": 3},
        {"num_beams": 4, "num_return_sequences": 3, "length_penalty": 0.5},
        {"repetition_penalty": 1.5, "no_repeat_ngram_size": 2},
    ],
    ids=["sampling", "return-sequences", "beams", "penalties"],
)
def test_search_options(name: str, options: dict[str, Any]) -> None:
    model, inputs = matrix.model("llava", torch.float64), inputs_of("llava")
    run = matrix.compressed(model, matrix.method(name), inputs, **options)
    matrix.check_against_reference(model, run, inputs, **options)


@pytest.mark.parametrize("name", METHODS)
def test_rows_that_end_early(name: str) -> None:
    model, inputs = matrix.model("qwen2_5_vl", torch.float64), inputs_of("qwen2_5_vl")
    free = matrix.compressed(model, matrix.method(name), inputs)
    width = inputs["input_ids"].shape[1]
    ends = {"eos_token_id": int(free.tokens[1, width + 1])}
    run = matrix.compressed(model, matrix.method(name), inputs, **ends)
    assert (run.tokens[1, width + 2 :] == families.PAD).all()
    matrix.check_against_reference(model, run, inputs, **ends)


class _Words:
    """As much of a tokenizer as a streamer needs."""

    def decode(self, ids: list[int], **unused: Any) -> str:
        return "".join(f"{int(i)} " for i in ids)


class _Streamer(transformers.TextStreamer):
    def __init__(self) -> None:
        super().__init__(_Words(), skip_prompt=True)  # type: ignore[arg-type]
        self.text = ""

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self.text += text


@pytest.mark.parametrize("name", METHODS)
def test_streaming_of_text(name: str) -> None:
    streamer = _Streamer()
    inputs = families.prompt("llava")
    run = matrix.compressed(matrix.model("llava"), matrix.method(name), inputs, streamer=streamer)
    assert [int(word) for word in streamer.text.split()] == run.tokens[0, inputs["input_ids"].shape[1] :].tolist()

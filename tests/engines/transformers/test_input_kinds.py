"""Loops by hand, prompts of embeddings, videos, half precision, eager attention, and gradients."""

from __future__ import annotations

import families
import matrix
import pytest
import torch
from masked_reference import largest_difference, masked
from modes import CHUNKS, FAMILY_AND_METHOD, METHODS, by_hand, inputs_of, unmasked

import foveakv

pytestmark = pytest.mark.usefixtures("no_gradients")


@FAMILY_AND_METHOD
def test_loops_by_hand(family: str, name: str) -> None:
    """`model(...)` step by step, one and several tokens at a time, without position ids."""
    model = matrix.model(family, torch.float64)
    inputs = unmasked(families.prompt(family, dtype=torch.float64))
    with foveakv.compress(model, matrix.method(name), trace=True) as session:
        got = list(by_hand(family, model, None, inputs, CHUNKS))
        trace = list(session.trace)
        assert session.report.tokens_seen == inputs["input_ids"].shape[1] + sum(map(len, CHUNKS))
    with masked(model, trace):
        want = list(by_hand(family, model, None, inputs, CHUNKS))
    assert largest_difference(got, want, every_row=True) < 1e-6


@pytest.mark.parametrize("name", METHODS)
def test_gradients_switched_on(name: str) -> None:
    """A loop by hand that forgot `torch.no_grad()` stores no autograd graph."""
    model = matrix.model("llama")
    with torch.enable_grad(), foveakv.compress(model, matrix.method(name)) as session:
        list(by_hand("llama", model, None, families.prompt("llama"), CHUNKS))
        tensors = [layer.segments.runs.keys for layer in session.cache.compressed]
    assert not any(keys.requires_grad for keys in tensors)


@pytest.mark.parametrize("name", METHODS)
def test_prompts_of_embeddings(name: str) -> None:
    model, inputs = matrix.model("llama", torch.float64), inputs_of("llama")
    embeddings = {
        "inputs_embeds": model.get_input_embeddings()(inputs["input_ids"]), "attention_mask": inputs["attention_mask"]
    }  # fmt: skip
    by_ids = matrix.compressed(model, matrix.method(name), inputs)
    run = matrix.compressed(model, matrix.method(name), embeddings)
    assert largest_difference(run.logits, by_ids.logits) < 1e-6


def test_videos() -> None:
    for family in ("qwen2_vl", "qwen2_5_vl"):
        model = matrix.model(family, torch.float64)
        inputs = families.prompt(family, images=1, video=True, dtype=torch.float64)
        for name in METHODS:
            run = matrix.compressed(model, matrix.method(name), inputs)
            matrix.check_against_reference(model, run, inputs)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 0.2), (torch.float16, 0.03)])
def test_half_precision(name: str, dtype: torch.dtype, tolerance: float) -> None:
    model = matrix.model("qwen2_5_vl", dtype)
    inputs = families.batch("qwen2_5_vl", dtype=dtype).inputs
    run = matrix.compressed(model, matrix.method(name), inputs)
    assert all(step.isfinite().all() for step in run.logits)
    matrix.check_storage(run)
    matrix.check_against_reference(model, run, inputs, tolerance)


@pytest.mark.parametrize("name", METHODS)
def test_eager_attention_underneath(name: str) -> None:
    model = families.build("llava")  # in fp64, transformers' eager attention turns a pad's row into NaN
    model.set_attn_implementation("eager")
    inputs = inputs_of("llava", torch.float32)
    run = matrix.compressed(model, matrix.method(name), inputs)
    assert model.config.text_config._attn_implementation == "eager"
    matrix.check_against_reference(model, run, inputs, tolerance=1e-4)

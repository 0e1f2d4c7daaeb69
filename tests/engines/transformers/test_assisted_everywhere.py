"""Assisted decoding equals decoding without an assistant where that is promised, and is refused elsewhere."""

from __future__ import annotations

import copy
from typing import Any

import families
import matrix
import pytest
import torch
import witness

import foveakv
from foveakv.errors import UnsupportedModeError

pytestmark = pytest.mark.usefixtures("no_gradients")

FAMILIES = ["qwen2_5_vl", "llava"]
TOKENS = {"max_new_tokens": 8}
CANNOT_CROP = [name for name in matrix.METHODS if matrix.method(name).evicts_while_decoding]
CHOOSES_ONCE_PER_PASS = [name for name in matrix.METHODS if matrix.method(name).retrieves]  # not lossless
LOSSLESS = [name for name in matrix.METHODS if name not in (*CANNOT_CROP, *CHOOSES_ONCE_PER_PASS)]

# transformers gives an assistant model no images.
CASES = [(family, name, "lookup") for family in FAMILIES for name in LOSSLESS] + [
    ("qwen2", name, how)
    for name in LOSSLESS
    if not matrix.method(name).visual_only
    for how in ("lookup", "same", "other")
]


def repetitive(family: str) -> dict[str, Any]:
    """A prompt that ends as an earlier part of it goes on, so that the lookup drafts tokens at once."""
    inputs = families.prompt(family, images=2, text=20, dtype=torch.float64)
    inputs["input_ids"][0, -3:] = inputs["input_ids"][0, 3:6]
    return inputs


def assistant(how: str, family: str, model: Any) -> dict[str, Any]:
    """Options for drafts from the prompt, from a model that is right, or from one that is often wrong."""
    if how == "lookup":
        return {"prompt_lookup_num_tokens": 3}
    helper = copy.deepcopy(model) if how == "same" else families.build(family, seed=9, dtype=torch.float64)
    return {"assistant_model": helper}


def test_every_method_is_in_one_of_the_groups() -> None:
    assert set(CHOOSES_ONCE_PER_PASS) == {"hybridkv", "quest"}
    assert {"full", "snapkv", "adakv", "pyramidkv", "mixkv", "sparsemm", "prefixkv", "lookm"} <= set(LOSSLESS)
    assert {"hae", "h2o", "streaming"} <= set(CANNOT_CROP)


@pytest.mark.parametrize(("family", "name", "how"), CASES)
def test_the_same_tokens(family: str, name: str, how: str) -> None:
    """In fp64, where no near tie can part two runs that choose for themselves."""
    method = matrix.method(name)
    model, inputs = matrix.model(family, torch.float64), repetitive(family)
    alone = matrix.compressed(model, method, inputs, **TOKENS)
    helped = matrix.compressed(model, method, inputs, **TOKENS, **assistant(how, family, model))
    assert torch.equal(helped.tokens, alone.tokens)
    assert helped.cache.prompt_columns == alone.cache.prompt_columns
    assert helped.session.report.evicted == alone.session.report.evicted
    witness.check(helped.trace, helped.stored)
    if not method.merges:
        matrix.check_against_reference(model, helped, inputs, **TOKENS, **assistant(how, family, model))


@pytest.mark.parametrize("name", ["hae", "fastv"])
def test_tokens_that_leave_the_residual_stream(name: str) -> None:
    """The prompt is read before the first drafts, so it can be shortened."""
    options = {"hae": {"ddes": False, "budget": None}, "fastv": {}}[name]
    method = matrix.method(name, drop_hidden_states=True, **options)
    model, inputs = matrix.model("llava", torch.float64), repetitive("llava")
    alone = matrix.compressed(model, method, inputs, **TOKENS)
    helped = matrix.compressed(model, method, inputs, **TOKENS, prompt_lookup_num_tokens=3)
    assert torch.equal(helped.tokens, alone.tokens)
    assert helped.stayed is not None
    matrix.check_against_reference(model, helped, inputs, **TOKENS, prompt_lookup_num_tokens=3)


@pytest.mark.parametrize("scores", [False, True], ids=["tokens", "hidden states"])
def test_one_output_of_the_prompt_and_its_drafts(scores: bool) -> None:
    """Logits and hidden states of a pass over prompt and drafts have the shape of one pass."""
    model, method = matrix.model("qwen2", torch.float64), matrix.method("full")
    ids = families.prompt("qwen2")["input_ids"]
    options = {"output_hidden_states": scores, "use_cache": True}
    want = model(input_ids=ids, **options)
    for kept in (0, 3, 8, torch.tensor([1, -2])):
        with foveakv.compress(model, method) as session, session.chunked_prefill(ids.shape[1] - 4):
            got = model(input_ids=ids, logits_to_keep=kept, **options)
        logits = want.logits[:, kept] if isinstance(kept, torch.Tensor) else want.logits[:, -kept:]
        assert got.logits.shape == logits.shape
        assert (got.logits - logits).abs().max() < 1e-9
        for mine, plain in zip(got.hidden_states or (), want.hidden_states or (), strict=True):
            assert (mine - plain).abs().max() < 1e-9


@pytest.mark.parametrize("name", CANNOT_CROP)
def test_refused_where_rejected_drafts_cannot_be_removed(name: str) -> None:
    model, inputs = matrix.model("llava", torch.float64), repetitive("llava")
    with pytest.raises(UnsupportedModeError, match=f"{name}.*without an assistant"):
        matrix.compressed(model, matrix.method(name), inputs, **TOKENS, prompt_lookup_num_tokens=3)


@pytest.mark.parametrize("name", CHOOSES_ONCE_PER_PASS)
@pytest.mark.parametrize("family", FAMILIES)
def test_what_retrieves_chooses_once_for_all_drafts(family: str, name: str) -> None:
    """Other tokens may come out, as the documentation says; what is attended to is still what the trace says."""
    model, inputs = matrix.model(family, torch.float64), repetitive(family)
    run = matrix.compressed(model, matrix.method(name), inputs, **TOKENS, prompt_lookup_num_tokens=3)
    matrix.check_against_reference(model, run, inputs, **TOKENS, prompt_lookup_num_tokens=3)

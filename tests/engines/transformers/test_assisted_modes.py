"""Assisted decoding with a lookup in the prompt and with an assistant model."""

from __future__ import annotations

import copy
from typing import Any

import families
import matrix
import pytest
import torch

pytestmark = pytest.mark.usefixtures("no_gradients")


@pytest.mark.parametrize("name", ["full", "snapkv", "hybridkv", "adakv"])
@pytest.mark.parametrize("how", ["lookup", "same", "other"])
def test_assisted_decoding(name: str, how: str) -> None:
    """Drafts from the prompt, from a model that is always right, and from one that is always wrong."""
    model = matrix.model("llama", torch.float64)
    inputs = families.encode("llama", [families.Row((8,) * 6, seed=2)])
    inputs["input_ids"][:, 1:41] = inputs["input_ids"][:, 1:9].repeat(1, 5)
    options: dict[str, Any] = {"max_new_tokens": 10}
    if how == "lookup":
        options["prompt_lookup_num_tokens"] = 3
    else:
        options["assistant_model"] = copy.deepcopy(model) if how == "same" else families.build("llama", seed=9).double()
    run = matrix.compressed(model, matrix.method(name), inputs, **options)
    assert run.tokens.shape[1] == inputs["input_ids"].shape[1] + 10
    assert max(step.shape[1] for step in run.logits[1:]) > 1 or how == "lookup"
    matrix.check_against_reference(model, run, inputs, **options)
    unassisted = matrix.compressed(model, matrix.method(name), inputs, max_new_tokens=10)
    if name == "full":
        assert torch.equal(run.tokens, unassisted.tokens)
    if name != "hybridkv":  # drafts that come with the prompt take no part in what is kept of it
        columns = inputs["input_ids"].shape[1]
        for mine, theirs in zip(matrix.positions_held(run), matrix.positions_held(unassisted), strict=True):
            assert mine[(mine >= 0) & (mine < columns)].tolist() == theirs[(theirs >= 0) & (theirs < columns)].tolist()


def test_assisted_decoding_on_images() -> None:
    model = matrix.model("qwen2_5_vl", torch.float64)
    inputs = families.prompt("qwen2_5_vl", dtype=torch.float64)
    options = {"prompt_lookup_num_tokens": 3, "max_new_tokens": 10}
    run = matrix.compressed(model, matrix.method("snapkv"), inputs, **options)
    matrix.check_against_reference(model, run, inputs, **options)

"""What methods declare is true: the granularity of what they keep, and what an engine refuses for it."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import families
import matrix
import pytest
import torch

import foveakv
from foveakv.engines.transformers.options import PREALLOCATED
from foveakv.errors import MethodError
from foveakv.methods.capabilities import Capabilities

KINDS = [(name, {}) for name in matrix.METHODS] + matrix.VARIANTS
FAMILIES = ["llava", "qwen2_5_vl"]
ORDER = ("token", "layer", "head")
EVERY = pytest.mark.parametrize(("name", "options"), KINDS, ids=str)


@functools.cache
def held(family: str, name: str, options: tuple[tuple[str, Any], ...]) -> list[list[list[list[int]]]]:
    """For every step and sequence of a batch: layer -> head -> positions, of the prompt and of what was decoded."""
    model, inputs = matrix.model(family), families.batch(family).inputs
    run = matrix.compressed(model, matrix.method(name, **dict(options)), inputs, max_new_tokens=8)
    steps = [[step[layer] for layer in sorted(step)] for step in run.trace[1:]] + [matrix.positions_held(run)]
    return [
        [[[p for p in head.tolist() if p >= 0] for head in layer[b]] for layer in layers]
        for layers in steps
        for b in range(len(inputs["input_ids"]))
    ]


def different(found: list[list[list[list[int]]]]) -> str:
    """The granularity of what is stored: "head" where heads of a layer ever differ, "layer" where layers do."""
    if any(head != layer[0] for layers in found for layer in layers for head in layer):
        return "head"
    return "layer" if any(layer != layers[0] for layers in found for layer in layers) else "token"


@EVERY
def test_granularity_is_what_a_method_does(name: str, options: dict[str, Any]) -> None:
    """On two families, after the prompt and in every step: never finer than declared, and somewhere as fine."""
    if name == "mustdrop":
        options = {**options, "layers": "1,2"}  # a layer before the first filtering one keeps everything
    found = [different(held(family, name, tuple(options.items()))) for family in FAMILIES]
    assert max(found, key=ORDER.index) == matrix.method(name, **options).granularity


@pytest.mark.parametrize("granularity", ORDER)
@EVERY
def test_engines_refuse_what_is_finer(name: str, options: dict[str, Any], granularity: Any) -> None:
    method, engine = matrix.method(name, **options), Capabilities("the tested engine", granularity)
    reason = engine.refusal(method)
    if ORDER.index(method.granularity) <= ORDER.index(granularity):
        assert reason is None
        engine.check(method)
        return
    stores = {"token": "one set of tokens for all layers", "layer": "one set of tokens per layer"}[granularity]
    assert reason is not None
    assert f"the tested engine stores {stores}" in reason
    with pytest.raises(MethodError, match=f"{name} is not supported here: it stores .*; do something else"):
        engine.check(method, "do something else")


def test_a_token_engine_takes_exactly_these() -> None:
    engine = Capabilities("an engine", "token")
    taken = [name for name in matrix.METHODS if engine.refusal(matrix.method(name)) is None]
    assert taken == [name for name in matrix.METHODS if matrix.method(name).granularity == "token"]
    assert {"full", "random", "streaming"} <= set(taken)
    assert engine.refusal(matrix.method("hae", ddes=False, budget=None)) is None


@pytest.mark.parametrize(
    ("lacking", "name", "options", "reason"),
    [
        ("decode_eviction", "streaming", {}, "evicts while decoding"),
        ("retrieval", "quest", {}, "reads chunks from a store in every step"),
        ("attention_sum", "h2o", {}, "observes the attention of every decode step"),
        ("merging", "lookm", {}, "replaces keys and values"),
        ("token_pruning", "fastv", {"drop_hidden_states": True}, "prunes tokens from the residual stream"),
    ],
)
def test_refusals_name_what_is_lacking(lacking: str, name: str, options: dict[str, Any], reason: str) -> None:
    method = matrix.method(name, **options)
    assert Capabilities("an engine").refusal(method) is None
    refusal = Capabilities("an engine", **{lacking: False}).refusal(method)
    assert refusal is not None
    assert reason in refusal
    assert "an engine cannot do" in refusal
    for other in {each.name for each in dataclasses.fields(Capabilities)} - {lacking, "engine", "granularity"}:
        assert other == "attention_sum" or Capabilities("an engine", **{other: False}).refusal(method) is None or (
            name == "h2o" and other == "decode_eviction"
        )  # fmt: skip


@pytest.mark.parametrize("name", matrix.METHODS)
def test_preallocated_slots_refuse_what_acts_later(name: str) -> None:
    """With the reason, before any token is read; and take everything else."""
    model, method = matrix.model("llava"), matrix.method(name)
    if not {"decode", "read"} & set(method.decides) and not method.observes.second_pass:
        assert PREALLOCATED.refusal(method) is None
        foveakv.cache_for(model, method, preallocate=4)
        return
    what = "reads chunks" if method.retrieves else "evicts while decoding"
    if method.observes.second_pass:
        what = "needs a second pass"
    for make in (foveakv.cache_for, foveakv.compress):
        with pytest.raises(MethodError, match=f"{name} is not supported here: it {what}.*preallocated.*; remove"):
            make(model, method, preallocate=4)
    output = model.generate(**families.prompt("llava"), max_new_tokens=1)
    assert torch.is_tensor(output)  # nothing was left attached


def test_variants_that_act_at_the_prompt_only_are_taken() -> None:
    for name, options in (("hae", {"ddes": False, "budget": None}), ("hybridkv", {"classify": "all_static"})):
        assert PREALLOCATED.refusal(matrix.method(name, **options)) is None

"""Nested blocks, several models and methods, and caches outside the block or the model that they belong to."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import families
import matrix
import pytest
import torch
from attached import SHORT, Broken, fingerprint, used
from torch import Tensor

import foveakv
from foveakv import errors

pytestmark = pytest.mark.usefixtures("no_gradients")


def test_nested_blocks_on_one_model() -> None:
    model, inputs = used("llava", dtype=torch.float64), families.prompt("llava", dtype=torch.float64)
    want = fingerprint(model)
    alone = {name: matrix.compressed(model, matrix.method(name), inputs).tokens for name in ("snapkv", "streaming")}
    assert not torch.equal(alone["snapkv"], alone["streaming"])
    with foveakv.compress(model, matrix.method("snapkv")) as outer:
        assert torch.equal(model.generate(**inputs, **matrix.GREEDY).sequences, alone["snapkv"])
        with foveakv.compress(model, matrix.method("streaming")) as inner:
            assert torch.equal(model.generate(**inputs, **matrix.GREEDY).sequences, alone["streaming"])
            assert inner.cache.method.name == "streaming"
            assert outer.cache.method.name == "snapkv"
        assert torch.equal(model.generate(**inputs, **matrix.GREEDY).sequences, alone["snapkv"])
    assert fingerprint(model) == want


def test_blocks_that_do_not_nest() -> None:
    model, inputs = used("llava", dtype=torch.float64), families.prompt("llava", dtype=torch.float64)
    want = fingerprint(model)
    alone = matrix.compressed(model, matrix.method("streaming"), inputs).tokens
    first, second = (
        foveakv.compress(model, matrix.method("snapkv")),
        foveakv.compress(model, matrix.method("streaming")),
    )
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert torch.equal(model.generate(**inputs, **matrix.GREEDY).sequences, alone)
    second.__exit__(None, None, None)
    assert fingerprint(model) == want


def test_the_outer_blocks_conversation_goes_on_in_the_inner_block() -> None:
    model = matrix.model("llava", torch.float64)
    turn = families.first_turn("llava", [families.row("llava")], torch.float64)

    def talk(inside: Any) -> Tensor:
        with foveakv.compress(model, matrix.method("snapkv")), ExitStack() as stack:
            first = model.generate(**turn.inputs, **matrix.GREEDY)
            after = families.next_turn("llava", model, turn, first.sequences)
            if inside is not None:
                stack.enter_context(foveakv.compress(model, inside))
            second = model.generate(**after.inputs, **matrix.GREEDY, past_key_values=matrix.cache_of(first))
            assert matrix.cache_of(second).method.name == "snapkv"
            return second.sequences

    assert torch.equal(talk(None), talk(matrix.method("streaming")))


def test_one_method_object_on_two_models() -> None:
    one, two, method = families.build("llava"), families.build("llama"), matrix.method("snapkv")
    with foveakv.compress(one, method):
        with pytest.raises(errors.CacheInUseError, match="another model"), foveakv.compress(two, method):
            pass
        assert "generate" not in vars(two)
        with foveakv.compress(two, matrix.method("snapkv")):
            two.generate(**families.prompt("llama"), **SHORT)
    with foveakv.compress(two, method) as session:
        two.generate(**families.prompt("llama"), **SHORT)
        assert session.report.evicted > 0


def test_two_models_at_once() -> None:
    one, two = (families.build("llava", seed=seed, dtype=torch.float64) for seed in (0, 1))
    inputs = families.prompt("llava", dtype=torch.float64)
    alone = [matrix.compressed(model, matrix.method("hae"), inputs).tokens for model in (one, two)]
    with foveakv.compress(one, matrix.method("hae")), foveakv.compress(two, matrix.method("hae")):
        both = [model.generate(**inputs, **matrix.GREEDY).sequences for model in (one, two)]
    assert torch.equal(alone[0], both[0])
    assert torch.equal(alone[1], both[1])


@pytest.mark.parametrize("attached", [False, True], ids=["plain", "attached"])
def test_a_cache_of_another_model(attached: bool) -> None:
    one, two, inputs = families.build("llava"), families.build("llava", seed=1), families.prompt("llava")
    cache = foveakv.cache_for(one, matrix.method("snapkv"))
    with ExitStack() as stack:
        if attached:
            stack.enter_context(foveakv.compress(two, matrix.method("snapkv")))
        with pytest.raises(errors.CacheInUseError):
            two.generate(**inputs, **SHORT, past_key_values=cache)
        with pytest.raises(errors.CacheInUseError):
            two(**inputs, **{matrix.cache_argument("llava"): cache})
    one.generate(**inputs, **SHORT, past_key_values=cache)  # and it is still good for its own


@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl", "gemma3", "llama"])
def test_a_cache_after_its_block(family: str) -> None:
    model, inputs = matrix.model(family), families.prompt(family)
    with foveakv.compress(model, matrix.method("snapkv")):
        output = model.generate(**inputs, **matrix.GREEDY)
    cache = matrix.cache_of(output)
    longer = {"input_ids": torch.cat([output.sequences, torch.full((1, 3), 50)], 1)}
    with pytest.raises(errors.CacheInUseError, match="compress"):
        model.generate(**longer, **SHORT, past_key_values=cache)
    with pytest.raises(errors.CacheInUseError, match="compress"):
        model(input_ids=longer["input_ids"][:, -3:], **{matrix.cache_argument(family): cache})


def test_a_submodule_is_not_the_model() -> None:
    """The prompt would be unknown: the decoder inside sees no image positions."""
    model, inputs = matrix.model("llama"), families.prompt("llama")
    with foveakv.compress(model, matrix.method("snapkv")):
        cache = foveakv.cache_for(model, matrix.method("snapkv"))
        with pytest.raises(errors.CacheInUseError, match="submodule"):
            model.model(input_ids=inputs["input_ids"], **{matrix.cache_argument("llama"): cache})


def test_a_cache_whose_forward_pass_failed() -> None:
    model, inputs = matrix.model("llama", torch.float64), families.prompt("llama")
    cache = foveakv.cache_for(model, matrix.method("snapkv"))
    broken = model.model.layers[2].mlp.register_forward_pre_hook(lambda *unused: (_ for _ in ()).throw(Broken()))
    with pytest.raises(Broken):
        model.generate(**inputs, **SHORT, past_key_values=cache)
    broken.remove()
    with pytest.raises(errors.CacheInUseError, match="failed"):
        model.generate(**inputs, **SHORT, past_key_values=cache)
    with foveakv.compress(model, matrix.method("snapkv")):
        got = matrix.plain(model, inputs).tokens
    assert torch.equal(got, matrix.compressed(model, matrix.method("snapkv"), inputs).tokens)


def test_a_reset_cache_begins_a_new_prompt() -> None:
    model, inputs = matrix.model("llava", torch.float64), families.prompt("llava", dtype=torch.float64)
    other = families.prompt("llava", images=1, seed=4, dtype=torch.float64)
    want = matrix.compressed(model, matrix.method("hae"), inputs)
    cache = foveakv.cache_for(model, matrix.method("hae"))
    model.generate(**other, **SHORT, past_key_values=cache)
    cache.reset()
    assert cache.get_seq_length() == 0
    assert torch.equal(model.generate(**inputs, **matrix.GREEDY, past_key_values=cache).sequences, want.tokens)

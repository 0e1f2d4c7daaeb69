"""Attaching and detaching: the model is restored, and sessions, caches and models are kept apart."""

from __future__ import annotations

import gc
import json
import weakref
from contextlib import ExitStack
from typing import Any

import families
import matrix
import pytest
import torch
import transformers
from masked_reference import largest_difference
from torch import Tensor

import foveakv
from foveakv import errors

pytestmark = pytest.mark.usefixtures("no_gradients")

SHORT = {"max_new_tokens": 4, "do_sample": False}


def used(family: str, seed: int = 0) -> Any:
    """A model that has generated once: transformers installs hooks of its own in some vision towers then."""
    model = families.build(family, seed=seed)
    model.generate(**families.prompt(family), max_new_tokens=1)
    return model


def fingerprint(model: Any) -> dict[str, Any]:
    """Everything on a model that attaching could change: attributes, hooks, attention implementations, M-RoPE state."""

    def implementations(config: Any) -> Any:
        children = {key: getattr(config, key, None) for key in getattr(config, "sub_configs", {})}
        nested = {key: implementations(child) for key, child in children.items() if child is not None}
        return config._attn_implementation, nested

    modules = {}
    for name, module in model.named_modules():
        hooks = {key: len(value) for key, value in vars(module).items() if "hook" in key and isinstance(value, dict)}
        plain = {key: value for key, value in vars(module).items() if isinstance(value, (int, str, bool, type(None)))}
        modules[name] = sorted(vars(module)), hooks, plain
    return {"modules": modules, "attention": implementations(model.config), "class": type(model)}


class Broken(Exception):
    pass


class _Stop(transformers.StoppingCriteria):
    """Raises in the middle of `generate`."""

    def __init__(self, after: int) -> None:
        self.left = after

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
        self.left -= 1
        if self.left == 0:
            raise Broken
        return torch.zeros(len(input_ids), dtype=torch.bool)


# -------------------------------------------------------------------------------------------------- the way back


@pytest.mark.parametrize("family", families.PLAIN)
def test_leaving_restores_the_model(family: str) -> None:
    model, inputs = families.build(family), families.prompt(family)
    before = model.generate(**inputs, **SHORT)
    want = fingerprint(model)
    with foveakv.compress(model, matrix.method("hae")):
        assert fingerprint(model) != want
        model.generate(**inputs, **SHORT)
    assert fingerprint(model) == want
    assert torch.equal(model.generate(**inputs, **SHORT), before)

    def fail() -> None:
        with foveakv.compress(model, matrix.method("snapkv")):
            model.generate(**inputs, **SHORT)
            raise Broken

    with pytest.raises(Broken):
        fail()
    assert fingerprint(model) == want

    with pytest.raises(Broken), foveakv.compress(model, matrix.method("snapkv")):
        model.generate(**inputs, **SHORT, stopping_criteria=[_Stop(after=2)])
    assert fingerprint(model) == want
    assert torch.equal(model.generate(**inputs, **SHORT), before)


@pytest.mark.parametrize("options", [{"ddes": False, "budget": None}, {"budget": None}], ids=["dap", "both"])
def test_leaving_restores_the_model_after_hidden_states_were_dropped(options: dict[str, Any]) -> None:
    model, inputs = families.build("llava"), families.prompt("llava")
    before, want = model.generate(**inputs, **SHORT), fingerprint(model)
    with foveakv.compress(model, matrix.method("hae", drop_hidden_states=True, **options)) as session:
        model.generate(**inputs, **SHORT)
        assert session.report.evicted > 0
    assert fingerprint(model) == want
    assert torch.equal(model.generate(**inputs, **SHORT), before)
    cache = foveakv.cache_for(model, matrix.method("hae", drop_hidden_states=True, **options))
    model.generate(**inputs, **SHORT, past_key_values=cache)
    del cache
    gc.collect()
    assert fingerprint(model) == want


def test_a_cache_of_ones_own_detaches_when_it_is_collected(collected: None) -> None:
    model, inputs = used("qwen2_5_vl"), families.prompt("qwen2_5_vl")
    want = fingerprint(model)
    first = foveakv.cache_for(model, matrix.method("snapkv"))
    second = foveakv.cache_for(model, matrix.method("hae"))
    model.generate(**inputs, **SHORT, past_key_values=first)
    del first
    gc.collect()
    assert fingerprint(model) != want
    model.generate(**inputs, **SHORT, past_key_values=second)
    del second
    gc.collect()
    assert fingerprint(model) == want


def test_the_towers_keep_their_attention() -> None:
    model = families.build("llava")
    with foveakv.compress(model, matrix.method("snapkv")):
        assert model.config.text_config._attn_implementation.startswith("foveakv")
        assert model.config.vision_config._attn_implementation == "sdpa"


def test_nothing_is_written_into_a_saved_config(tmp_path: Any) -> None:
    model = families.build("llava")
    with foveakv.compress(model, matrix.method("snapkv")):
        model.config.save_pretrained(tmp_path)
        model.generation_config.save_pretrained(tmp_path)
    for file in tmp_path.glob("*.json"):
        assert "foveakv" not in json.dumps(json.loads(file.read_text()))


def test_caches_and_models_can_be_collected(collected: None) -> None:
    model, inputs = families.build("qwen2_5_vl"), families.prompt("qwen2_5_vl")
    for name in ("hae", "hybridkv", "snapkv"):
        with foveakv.compress(model, matrix.method(name), trace=True) as session:
            output = model.generate(**inputs, **matrix.GREEDY)
            cache = weakref.ref(session.cache)
            segments = weakref.ref(session.cache.compressed[0].segments)
        del session, output
        assert segments() is None, f"{name}: memory is freed by garbage collection only"
        assert cache() is None, name
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_dense_keys_are_gone_after_the_prompt(collected: None) -> None:
    """What a method drops is freed while the session lives: no tensor as long as the prompt remains."""
    model, inputs = families.build("internvl"), families.prompt("internvl", images=8)
    columns = inputs["input_ids"].shape[1]
    with foveakv.compress(model, matrix.method("snapkv", budget=0.2)):
        output = model.generate(**inputs, max_new_tokens=1, return_dict_in_generate=True)
        gc.collect()
        shapes = [t.shape for t in gc.get_objects() if isinstance(t, Tensor) and t.dim() == 4]
    assert output is not None
    assert (1, families.KV_HEADS, columns, 16) not in [tuple(shape) for shape in shapes]


# ------------------------------------------------------------------------------------------------------ every time


@pytest.mark.parametrize("name", matrix.METHODS)
def test_the_second_sample_is_as_if_it_were_the_first(name: str) -> None:
    """Within one block, in a second block, and with one method object for all of it."""
    family, method = "qwen2_5_vl", matrix.method(name)
    first, second = families.prompt(family, images=2), families.batch(family).inputs
    fresh = matrix.compressed(families.build(family), matrix.method(name), second)
    model = matrix.model(family)
    for _ in range(2):
        with foveakv.compress(model, method) as session:
            model.generate(**first, **SHORT)
            output = model.generate(**second, **matrix.GREEDY)
            assert torch.equal(output.sequences, fresh.tokens)
            for layer in session.cache.compressed:
                assert torch.equal(session.kept(layer.layer_idx), fresh.cache.kept(layer.layer_idx))
            assert session.report.evicted == fresh.session.report.evicted


def test_a_text_prompt_after_an_image_prompt() -> None:
    """M-RoPE's offset of the image must not move the text."""
    for family in ("qwen2_5_vl", "qwen3_vl", "glm4v"):
        model = matrix.model(family)
        image, text = families.prompt(family, images=2), families.prompt(family, images=0, text=30)
        want = matrix.plain(families.build(family), text)
        with foveakv.compress(model, foveakv.methods.get("full")):
            model.generate(**image, **SHORT)
            got = matrix.plain(model, text)
        assert largest_difference(got.logits, want.logits) < 1e-5
        with foveakv.compress(model, matrix.method("snapkv")):
            model.generate(**image, **SHORT)
        assert largest_difference(matrix.plain(model, text).logits, want.logits) < 1e-5


def test_a_session_can_be_opened_again_but_not_twice_at_once() -> None:
    model, inputs = matrix.model("llava"), families.prompt("llava")
    session = foveakv.compress(model, matrix.method("snapkv"))
    with session:
        first = model.generate(**inputs, **SHORT)
        with pytest.raises(errors.CacheInUseError, match="already open"), session:
            pass
    with session:
        assert torch.equal(model.generate(**inputs, **SHORT), first)
    assert "generate" not in vars(model)


def test_before_anything_was_generated() -> None:
    model = matrix.model("llava")
    with foveakv.compress(model, matrix.method("snapkv")) as session:
        for read in (lambda: session.cache, lambda: session.report, lambda: session.trace, lambda: session.kept(0)):
            with pytest.raises(errors.CacheInUseError, match="nothing has been generated"):
                read()
        model.generate(**families.prompt("llava"), **SHORT)
        with pytest.raises(errors.CacheInUseError, match="trace=True"):
            _ = session.trace
        with pytest.raises(errors.MethodError, match="compressed layers"):
            session.kept(99)
    assert session.report.stored_slots > 0  # results outlive the block


def test_zero_evictions_are_flagged() -> None:
    model, inputs = matrix.model("llava"), families.prompt("llava")
    idle = matrix.compressed(model, foveakv.methods.get("snapkv", budget=1.0), inputs).session.report
    assert idle.evicted == 0
    assert "nothing was evicted" in idle.notes[0]
    assert "nothing was evicted" in str(idle)
    assert "nothing was evicted" in idle.to_json()
    assert not matrix.compressed(model, matrix.method("snapkv"), inputs).session.report.notes
    assert not matrix.compressed(model, foveakv.methods.get("full"), inputs).session.report.notes


# ----------------------------------------------------------------------------------------------- several at once


def test_nested_blocks_on_one_model() -> None:
    model, inputs = used("llava"), families.prompt("llava")
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
    model, inputs = used("llava"), families.prompt("llava")
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
    one, two = families.build("llava"), families.build("llava", seed=1)
    inputs = families.prompt("llava")
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
    model, inputs = matrix.model("llama"), families.prompt("llama")
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
    model, inputs, other = matrix.model("llava"), families.prompt("llava"), families.prompt("llava", images=1, seed=4)
    want = matrix.compressed(model, matrix.method("hae"), inputs)
    cache = foveakv.cache_for(model, matrix.method("hae"))
    model.generate(**other, **SHORT, past_key_values=cache)
    cache.reset()
    assert cache.get_seq_length() == 0
    assert torch.equal(model.generate(**inputs, **matrix.GREEDY, past_key_values=cache).sequences, want.tokens)

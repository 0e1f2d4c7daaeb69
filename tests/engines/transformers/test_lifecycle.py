"""Attaching and detaching: the model is restored, memory is freed, and no sample changes the next."""

from __future__ import annotations

import gc
import json
import weakref
from typing import Any

import families
import matrix
import pytest
import torch
import transformers
from attached import SHORT, Broken, fingerprint, used
from masked_reference import largest_difference
from torch import Tensor

import foveakv
from foveakv import errors

pytestmark = pytest.mark.usefixtures("no_gradients")


class _Stop(transformers.StoppingCriteria):
    """Raises in the middle of `generate`."""

    def __init__(self, after: int) -> None:
        self.left = after

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
        self.left -= 1
        if self.left == 0:
            raise Broken
        return torch.zeros(len(input_ids), dtype=torch.bool)


# -------------------------------------------------------------------------------------------------------- the way back


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


def test_a_cache_of_ones_own_lets_go_when_it_dies(collected: None) -> None:
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


# ---------------------------------------------------------------------------------------------------------- every time


@pytest.mark.parametrize("name", matrix.METHODS)
def test_the_second_sample_is_as_if_it_were_the_first(name: str) -> None:
    """Within one block, in a second block, and with one method object for all of it."""
    family, method = "qwen2_5_vl", matrix.method(name)
    first = families.prompt(family, images=2, dtype=torch.float64)
    second = families.batch(family, dtype=torch.float64).inputs
    fresh = matrix.compressed(families.build(family, dtype=torch.float64), matrix.method(name), second)
    model = matrix.model(family, torch.float64)
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
            got = matrix.plain(model, text, follow=want)
        assert largest_difference(got.logits, want.logits) < 1e-5
        with foveakv.compress(model, matrix.method("snapkv")):
            model.generate(**image, **SHORT)
        assert largest_difference(matrix.plain(model, text, follow=want).logits, want.logits) < 1e-5


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

"""Copies of an attached model are plain models; caches can be deep-copied, and say so where they cannot be pickled."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
from collections.abc import Callable
from typing import Any

import families
import matrix
import pytest
import torch
from attached import fingerprint, used

import foveakv
from foveakv import errors

pytestmark = pytest.mark.usefixtures("no_gradients")

SHORT = {"max_new_tokens": 4, "do_sample": False}


def saved(model: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    return torch.load(io.BytesIO(buffer.getvalue()), weights_only=False)


COPIES: list[Callable[[Any], Any]] = [
    copy.deepcopy,
    saved,
    *(lambda model, p=protocol: pickle.loads(pickle.dumps(model, p)) for protocol in (0, 2, pickle.HIGHEST_PROTOCOL)),
]
copies = pytest.mark.parametrize("duplicate", COPIES, ids=["deepcopy", "torch.save", "pickle0", "pickle2", "pickle"])
OPTIONS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("snapkv", {}, {}),
    ("hae", {"drop_hidden_states": True, "ddes": False, "budget": None}, {}),
    ("snapkv", {}, {"preallocate": 8}),
]


@copies
@pytest.mark.parametrize(("name", "options", "call"), OPTIONS)
@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl"])
def test_a_copy_made_inside_of_a_session_is_a_plain_model(
    family: str, duplicate: Any, name: str, options: dict[str, Any], call: dict[str, Any]
) -> None:
    model, inputs = used(family), families.prompt(family)
    if family == "llava" and duplicate is not copy.deepcopy:
        pytest.skip("transformers sets hooks in this vision tower that cannot be pickled, attached or not")
    want, plain = fingerprint(model), model.generate(**inputs, **SHORT)
    with foveakv.compress(model, matrix.method(name, **options), **call) as session:
        compressed = model.generate(**inputs, **SHORT)
        made = duplicate(model)
        assert fingerprint(made) == want
        assert torch.equal(made.generate(**inputs, **SHORT), plain)
        assert torch.equal(model.generate(**inputs, **SHORT), compressed)
        assert session.report.evicted > 0
    assert fingerprint(made) == fingerprint(model) == want
    with foveakv.compress(made, matrix.method(name, **options), **call):  # and can be compressed like any other
        assert torch.equal(made.generate(**inputs, **SHORT), compressed)


@copies
def test_a_copy_made_while_a_cache_is_alive(duplicate: Any) -> None:
    model, inputs = used("qwen2_5_vl"), families.prompt("qwen2_5_vl")
    want = fingerprint(model)
    cache = foveakv.cache_for(model, matrix.method("snapkv"))
    model.generate(**inputs, **SHORT, past_key_values=cache)
    made = duplicate(model)
    assert fingerprint(made) == want
    assert torch.equal(made.generate(**inputs, **SHORT), model.generate(**inputs, **SHORT))


def test_parts_of_a_model_and_its_config() -> None:
    model = families.build("llava")
    with foveakv.compress(model, matrix.method("snapkv")):
        assert copy.deepcopy(model.config).text_config._attn_implementation == "sdpa"
        assert pickle.loads(pickle.dumps(model.config)).text_config._attn_implementation == "sdpa"
        assert copy.deepcopy(model.get_decoder()).config._attn_implementation == "sdpa"
        assert type(model)(copy.deepcopy(model.config)).config.text_config._attn_implementation == "sdpa"
        assert model.config.text_config._attn_implementation == "foveakv_sdpa"


def test_what_another_library_had_set_on_the_model_is_kept() -> None:
    """accelerate sets a `forward` of its own on the instance."""
    model, inputs = families.build("llama"), families.prompt("llama")
    calls: list[int] = []
    forward = type(model).forward

    def own(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return forward(model, *args, **kwargs)

    own.__signature__ = inspect.signature(model.forward)  # type: ignore[attr-defined]
    model.forward = own
    with foveakv.compress(model, matrix.method("snapkv")):
        model.generate(**inputs, **SHORT)
        made = copy.deepcopy(model)
    assert len(calls) >= 2
    assert vars(made)["forward"] is own
    assert vars(model)["forward"] is own


@pytest.mark.parametrize("name", ["full", "hae", "hybridkv"])
def test_a_cache_is_deep_copied_and_not_pickled(name: str) -> None:
    model, inputs = families.build("llava"), families.prompt("llava")
    cache = foveakv.cache_for(model, matrix.method(name))
    tokens = model.generate(**inputs, **SHORT, past_key_values=cache)
    again = copy.deepcopy(cache)
    for layer in cache.compressed:
        assert torch.equal(cache.kept(layer.layer_idx), again.kept(layer.layer_idx))
    longer = torch.nn.functional.pad(tokens, (0, 2), value=20)
    assert torch.equal(
        model.generate(longer, **SHORT, past_key_values=cache), model.generate(longer, **SHORT, past_key_values=again)
    )
    for refused in (pickle.dumps, lambda cache: torch.save(cache, io.BytesIO()), copy.copy):
        with pytest.raises(errors.UnsupportedModeError, match=r"copy\.deepcopy"):
            refused(cache)


def test_a_session_is_neither_copied_nor_pickled() -> None:
    session = foveakv.compress(families.build("llava"), matrix.method("snapkv"))
    for refused in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(errors.UnsupportedModeError, match="cannot be copied or pickled"):
            refused(session)

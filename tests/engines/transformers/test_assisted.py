"""Drafted tokens: the first forward pass brings some together with the prompt, and rejected ones are taken back."""

from __future__ import annotations

from typing import Any

import families
import matrix
import pytest
import torch

import foveakv
from foveakv.engines.transformers import drafts
from foveakv.errors import UnsupportedModeError

FAMILIES = ["llava", "qwen2_5_vl", "qwen2"]
LOOKUP: dict[str, Any] = {"prompt_lookup_num_tokens": 3, "max_new_tokens": 16}


def repetitive(family: str, dtype: torch.dtype = torch.float32) -> Any:
    """A prompt that ends as an earlier part of it goes on, so that the lookup drafts tokens at once."""
    inputs = families.prompt(family, images=2, text=20, dtype=dtype)
    inputs["input_ids"][0, -3:] = inputs["input_ids"][0, 3:6]
    return inputs


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("full", {}),
        ("snapkv", {}),
        ("adakv", {}),
        ("pyramidkv", {}),
        ("sparsemm", {}),
        ("mixkv", {}),
        ("quest", {"budget": 1.0}),
        ("vlcache", {}),
        ("prefixkv", {}),
        ("lookm", {}),
        ("hybridkv", {"classify": "all_static"}),
        ("hybridkv", {"budget": 1.0, "theta_quantile": 0.5}),
    ],
)
def test_drafting_changes_no_token(family: str, name: str, options: dict[str, Any]) -> None:
    """In fp64: drafts cannot be forced, and one pass over several tokens rounds other than one pass for each."""
    model, inputs = matrix.model(family, torch.float64), repetitive(family, torch.float64)
    one_by_one = matrix.compressed(model, matrix.method(name, **options), inputs, max_new_tokens=16)
    drafted = matrix.compressed(model, matrix.method(name, **options), inputs, **LOOKUP)
    assert torch.equal(drafted.tokens, one_by_one.tokens)
    assert len(drafted.logits) <= 16
    prompt = inputs["input_ids"].shape[1]
    assert drafted.cache.prompt_columns == prompt, "a draft was taken for a part of the prompt"
    assert drafted.session.report.evicted == one_by_one.session.report.evicted
    for layer in drafted.cache.compressed:
        assert int(layer.segments.positions().max()) == drafted.cache.seen - 1


def test_the_lookup_does_draft_behind_the_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    split = drafts.split

    def noted(kwargs: dict[str, Any], drafted: int) -> Any:
        seen.append(drafted)
        return split(kwargs, drafted)

    monkeypatch.setattr(drafts, "split", noted)
    for family in FAMILIES:
        seen.clear()
        matrix.compressed(matrix.model(family), matrix.method("snapkv"), repetitive(family), **LOOKUP)
        assert len(seen) == 1
        assert seen[0] > 0


def test_retrieval_goes_on_after_a_crop() -> None:
    model, inputs = matrix.model("qwen2_5_vl"), repetitive("qwen2_5_vl")
    method = matrix.method("hybridkv", theta_quantile=0.5)
    drafted = matrix.compressed(model, method, inputs, **LOOKUP)
    assert drafted.tokens.shape[1] == inputs["input_ids"].shape[1] + 16
    assert drafted.session.report.retrieved > 0
    for layer in drafted.cache.compressed:
        assert bool((layer.segments.positions()[layer.segments.valid()] >= 0).all())


def test_methods_that_cannot_crop_say_so() -> None:
    with pytest.raises(UnsupportedModeError, match="draft tokens"):
        matrix.compressed(matrix.model("llava"), matrix.method("h2o"), repetitive("llava"), **LOOKUP)


@pytest.mark.parametrize("own_cache", [False, True])
def test_max_decode_slots_is_refused_before_the_run(own_cache: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs, method = matrix.model("llava"), repetitive("llava"), matrix.method("snapkv")
    monkeypatch.setattr(foveakv.CompressedCache, "begin_forward", lambda *args, **kwargs: pytest.fail("the model ran"))
    cache = {"past_key_values": foveakv.cache_for(model, method, max_decode_slots=4)} if own_cache else {}
    said = r"snapkv: max_decode_slots evicts .* without an assistant"
    with foveakv.compress(model, method, max_decode_slots=4), pytest.raises(UnsupportedModeError, match=said):
        model.generate(**inputs, **LOOKUP, **cache)

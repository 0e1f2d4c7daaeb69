"""`guidance_scale`: generate runs the model twice a step; the session reports the prompt, not the other branch."""

from __future__ import annotations

from typing import Any

import families
import matrix
import pytest
import torch
from masked_reference import largest_difference

import foveakv
from foveakv import errors

pytestmark = pytest.mark.usefixtures("no_gradients")

NEGATIVE = torch.tensor([[1, 30, 31, 32, 33, 34, 35, 36, 37, 38]])
GUIDED = [{"guidance_scale": 1.5}, {"guidance_scale": 1.5, "negative_prompt_ids": NEGATIVE}]
guided = pytest.mark.parametrize("guidance", GUIDED, ids=["last token", "negative prompt"])
# A second run of the model has other numbers of tokens, so tokens are forced: scores differ, the choice does not.
FORCED = [40, 41, 42, 43, 44, 45]


class Force(families.hf.LogitsProcessor):
    """Chooses the tokens itself and records what it was given."""

    def __init__(self) -> None:
        self.scores: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        token = FORCED[len(self.scores)]
        self.scores.append(scores.nan_to_num(neginf=0.0))  # tokens that a model never generates
        return torch.full_like(scores, -1e4).index_fill(1, torch.tensor([token]), 0.0)


def run(model: Any, inputs: dict[str, Any], **options: Any) -> list[torch.Tensor]:
    force = Force()
    model.generate(**inputs, max_new_tokens=6, do_sample=False, logits_processor=[force], **options)
    return force.scores


@guided
@pytest.mark.parametrize("family", families.PLAIN)
def test_with_everything_kept_it_is_the_plain_model(family: str, guidance: dict[str, Any]) -> None:
    model, inputs = matrix.model(family), families.prompt(family)
    try:
        want = run(model, inputs, **guidance)
    except RuntimeError:  # transformers' own, with M-RoPE
        with (
            foveakv.compress(model, foveakv.Full()),
            pytest.raises(errors.UnsupportedModeError, match="guidance_scale: transformers"),
        ):
            run(model, inputs, **guidance)
        return
    with foveakv.compress(model, foveakv.Full()) as session:
        got = run(model, inputs, **guidance)
        assert len(session.caches) == 2
    assert largest_difference(got, want) < 1e-4


@guided
@pytest.mark.parametrize("name", matrix.METHODS)
def test_the_report_is_the_prompts(name: str, guidance: dict[str, Any]) -> None:
    model, inputs = matrix.model("llava"), families.prompt("llava", images=2)
    columns = inputs["input_ids"].shape[1]
    with foveakv.compress(model, matrix.method(name), trace=True) as alone:
        run(model, inputs)
    with foveakv.compress(model, matrix.method(name), trace=True) as session:
        run(model, inputs, **guidance)
    assert session.cache.prompt_columns == columns
    assert session.cache.method.name == name
    assert [cache.prompt_columns for cache in session.caches] == [
        columns,
        len(guidance.get("negative_prompt_ids", [[0]])[0]),
    ]
    for layer in alone.cache.compressed:  # forced tokens are the same, so is what stays of them
        assert torch.equal(session.kept(layer.layer_idx), alone.kept(layer.layer_idx))
    assert session.report.evicted == alone.report.evicted
    assert session.report.stored_bytes == alone.report.stored_bytes
    assert len(session.trace) == len(alone.trace)
    assert "guidance_scale" in " ".join(session.report.notes)
    assert not alone.report.branches
    other = session.caches[1].method
    assert other.name == ("full" if session.method.visual_only else name)
    assert session.report.to_dict()["branches"][0]["method"] == other.name


@pytest.mark.parametrize("options", [{"preallocate": 8}, {"kv_dtype": "int8"}, {"max_decode_slots": 4}])
def test_options_hold_for_both(options: dict[str, Any]) -> None:
    model, inputs = matrix.model("llava"), families.prompt("llava")
    with foveakv.compress(model, matrix.method("fastv"), **options) as session:
        run(model, inputs, **GUIDED[1])
        assert [cache.options for cache in session.caches] == [session.options] * 2
        assert session.report.evicted > 0
        run(model, inputs)
        assert len(session.caches) == 1  # of the latest call only
        assert not session.report.branches


@guided
def test_a_cache_of_ones_own_is_the_prompts(guidance: dict[str, Any]) -> None:
    """The other branch has no cache that was passed in, so it is plain."""
    model, inputs = matrix.model("llava"), families.prompt("llava")
    want = run(model, inputs, **guidance)
    cache = foveakv.cache_for(model, foveakv.Full())
    assert largest_difference(run(model, inputs, past_key_values=cache, **guidance), want) < 1e-4
    assert cache.prompt_columns == inputs["input_ids"].shape[1]


def test_a_later_turn() -> None:
    model, inputs = matrix.model("llava"), families.prompt("llava")
    with foveakv.compress(model, matrix.method("fastv")) as session:
        first = model.generate(**inputs, **matrix.GREEDY, guidance_scale=1.5)
        prompt = session.cache
        longer = torch.nn.functional.pad(first.sequences, (0, 3), value=50)
        model.generate(longer, **matrix.GREEDY, guidance_scale=1.5, past_key_values=matrix.cache_of(first))
        assert session.cache is prompt
        assert len(session.caches) == 2

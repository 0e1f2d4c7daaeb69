"""Repeating, selecting, cropping, reordering and copying caches: each operation succeeds completely or is refused."""

from __future__ import annotations

import copy
from typing import Any

import families
import matrix
import pytest
import torch
from masked_reference import largest_difference
from modes import inputs_of, unmasked

import foveakv
from foveakv import errors
from foveakv.engines.transformers import cache as cache_module

pytestmark = pytest.mark.usefixtures("no_gradients")


def start(model: Any, inputs: dict[str, Any]) -> Any:
    return matrix.cache_of(model(**inputs, use_cache=True))


@pytest.mark.parametrize("name", matrix.METHODS)
def test_repeating_and_selecting_sequences(name: str) -> None:
    model, argument = matrix.model("llava", torch.float64), matrix.cache_argument("llava")
    inputs = unmasked(families.prompt("llava", dtype=torch.float64))
    with foveakv.compress(model, matrix.method(name)):
        cache = start(model, inputs)
        want = [model(input_ids=torch.tensor([[t]]), **{argument: cache}).logits for t in (11, 12, 13, 14)]
        cache = start(model, inputs)
        cache.batch_repeat_interleave(3)
        got = [model(input_ids=torch.full((3, 1), t), **{argument: cache}).logits[1:2] for t in (11, 12)]
        cache.batch_select_indices(torch.tensor([2]))
        got += [model(input_ids=torch.tensor([[t]]), **{argument: cache}).logits for t in (13, 14)]
    assert largest_difference(got, want) < 1e-9


@pytest.mark.parametrize("name", [name for name in matrix.METHODS if not matrix.method(name).evicts_while_decoding])
def test_cropping(name: str) -> None:
    """Drafts verified by hand: with turns="store", tokens that are read together are no block to compress."""
    model, argument = matrix.model("llava", torch.float64), matrix.cache_argument("llava")
    inputs = unmasked(families.prompt("llava", dtype=torch.float64))
    answers = []
    with foveakv.compress(model, matrix.method(name), turns="store"):
        for draft in ([], [77, 78, 79]):
            cache = start(model, inputs)
            model(input_ids=torch.tensor([[11]]), **{argument: cache})
            if draft:
                model(input_ids=torch.tensor([draft]), **{argument: cache})
                cache.crop(-len(draft))
            answers.append(model(input_ids=torch.tensor([[12, 13]]), **{argument: cache}).logits)
    assert (answers[0] - answers[1]).abs().max() < 1e-9


@pytest.mark.parametrize("name", ["hae", "h2o", "streaming"])
def test_a_cache_that_evicts_while_decoding_cannot_be_cropped(name: str) -> None:
    model = matrix.model("llama")
    run = matrix.compressed(model, matrix.method(name), families.prompt("llama"))
    assert not run.cache.is_croppable
    with pytest.raises(errors.UnsupportedModeError, match=name):
        run.cache.crop(-1)


def test_a_refused_crop_changes_no_layer() -> None:
    model, inputs = matrix.model("gemma3", torch.float64), inputs_of("gemma3")  # sliding layers crop first
    run = matrix.compressed(model, matrix.method("h2o"), inputs)
    lengths = [layer.get_seq_length() for layer in run.cache.layers]
    with pytest.raises(errors.UnsupportedModeError, match="evicts while decoding"):
        run.cache.crop(-1)
    assert [layer.get_seq_length() for layer in run.cache.layers] == lengths


def test_an_incomplete_prompt_is_neither_cropped_nor_reordered() -> None:
    model, argument = matrix.model("llama", torch.float64), matrix.cache_argument("llama")
    ids = families.prompt("llama")["input_ids"]
    with foveakv.compress(model, matrix.method("snapkv")) as session, session.chunked_prefill(ids.shape[1]):
        cache = matrix.cache_of(model(input_ids=ids[:, :20], use_cache=True))
        for change in (lambda: cache.crop(-3), lambda: cache.reorder_cache(torch.tensor([0]))):
            with pytest.raises(errors.CacheInUseError, match="not complete"):
                change()
        waiting = sum(layer._queries.nbytes for layer in cache.compressed)
        assert waiting > 0
        assert cache.stored_nbytes >= waiting  # what waits for the rest of the prompt is memory too
        model(input_ids=ids[:, 20:], **{argument: cache})
        assert cache.prefilled


def test_a_copy_made_under_inference_mode_goes_on_outside() -> None:
    model, argument = matrix.model("llama", torch.float64), matrix.cache_argument("llama")
    ids = families.prompt("llama")["input_ids"]
    cache = foveakv.cache_for(model, matrix.method("h2o"))
    with torch.inference_mode():
        model(input_ids=ids, **{argument: cache})
        twin = copy.deepcopy(cache)
    with torch.no_grad():
        logits = [model(input_ids=torch.tensor([[11]]), **{argument: c}).logits for c in (twin, cache)]
    assert torch.equal(*logits)


def test_position_ids_of_one_row_hold_for_all_sequences() -> None:
    model, argument = matrix.model("llama", torch.float64), matrix.cache_argument("llama")
    ids = torch.tensor([families.words(30, 0), families.words(30, 1)])
    cache = foveakv.cache_for(model, matrix.method("snapkv"))
    model(input_ids=ids, position_ids=torch.arange(30)[None], **{argument: cache})
    cache.reorder_cache(torch.tensor([1, 0]))
    assert cache.placed.shift.tolist() == [0, 0]
    cache.batch_select_indices(torch.tensor([1]))
    assert cache.placed.shift.tolist() == [0]


def state_of(cache: Any) -> dict[str, Any]:
    """What a cache is, for comparisons of before and after; tensors and maps are replaced and never written to."""
    own = {name: value for name, value in vars(cache).items() if name != "_started"}
    return {**own, "passes": None if cache.trace is None else len(cache.trace), **vars(cache.placed)}


@pytest.mark.parametrize("why", ["sequences", "interrupt", "warning"])
def test_a_pass_that_does_not_begin_changes_nothing(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A later turn: refused, interrupted after the method has begun it, or stopped by a warning that is an error."""
    model, argument = matrix.model("llama", torch.float64), matrix.cache_argument("llama")
    cache = foveakv.cache_for(model, matrix.method("snapkv"), trace=True)
    model(input_ids=torch.tensor([families.words(30, 0)]), **{argument: cache})
    twin, turn = copy.deepcopy(cache), {"position_ids": torch.arange(50, 54)[None]}
    before, ids = state_of(cache), torch.tensor([[11, 12, 13, 14]])
    with monkeypatch.context() as patch:
        error: Any = errors.CacheInUseError
        if why != "sequences":
            error = KeyboardInterrupt if why == "interrupt" else UserWarning

            def fail(*unused: Any) -> None:
                raise error

            patch.setattr(cache_module, "warn_beyond_positions", fail)
        with pytest.raises(error):
            model(input_ids=ids.expand(2 if why == "sequences" else 1, 4), **turn, **{argument: cache})
    after = state_of(cache)
    assert [name for name in before if after[name] is not before[name] and after[name] != before[name]] == []
    ours, theirs = (model(input_ids=ids, **turn, **{argument: each}).logits for each in (cache, twin))
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("change", ["reorder_cache", "batch_select_indices", "batch_repeat_interleave", "crop"])
def test_a_change_that_fails_half_way_is_the_end_of_a_cache(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, argument = matrix.model("llama", torch.float64), matrix.cache_argument("llama")
    cache = foveakv.cache_for(model, matrix.method("snapkv"))
    model(input_ids=torch.tensor([families.words(30, 0)]), **{argument: cache})
    model(input_ids=torch.tensor([[11]]), **{argument: cache})

    def full(*unused: Any) -> None:
        raise errors.PoolFullError("full")

    monkeypatch.setattr(cache.layers[1], change, full)
    with pytest.raises(errors.PoolFullError):
        getattr(cache, change)({"crop": -1, "batch_repeat_interleave": 2}.get(change, torch.tensor([0])))
    with pytest.raises(errors.CacheInUseError, match="half way"):
        model(input_ids=torch.tensor([[12]]), **{argument: cache})
    with pytest.raises(errors.CacheInUseError):
        cache.fork()

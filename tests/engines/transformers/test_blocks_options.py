"""Options of further blocks: what happens to turns, what shares are of, and what is never evicted."""

from __future__ import annotations

from typing import Any

import families
import matrix
import pytest
import torch
from families.rows import Picture, Row
from masked_reference import largest_difference, recorded

import foveakv
from foveakv import CacheOptions, errors

pytestmark = pytest.mark.usefixtures("no_gradients")


def two_turns(model: Any, method: Any, new: int = 40, first: Any = None, **options: Any) -> Any:
    """The cache after a prompt, six decoded tokens, and a turn of `new` words."""
    inputs = first or families.prompt("llava", dtype=torch.float64)
    with foveakv.compress(model, method, **options) as session:
        output = model.generate(**inputs, **matrix.GREEDY)
        ids = torch.cat([output.sequences, torch.tensor([families.words(new, 5)])], 1)
        again = {"input_ids": ids, **matrix.GREEDY, "max_new_tokens": 1}
        model.generate(**again, **{matrix.cache_argument("llava"): session.cache})
        return session.cache


def snapkv(budget: Any = 0.5) -> Any:
    return foveakv.methods.get("snapkv", budget=budget, window=4, kernel=1)


def kept(cache: Any) -> torch.Tensor:
    """bool [layers, heads, columns] of the first sequence."""
    found = torch.zeros(len(cache.compressed), cache.geometry.kv_heads, cache.seen, dtype=torch.bool)
    for layer in cache.compressed:
        for head, positions in enumerate(cache.kept(layer.layer_idx)[0]):
            found[layer.compressed_idx, head, positions[positions >= 0]] = True
    return found


def test_a_share_is_of_the_context_so_far_or_of_the_first_prompt() -> None:
    model = matrix.model("llava", torch.float64)
    first = two_turns(model, snapkv(), keep_text=False).full_prompt
    prompt = families.prompt("llava")["input_ids"].shape[1]
    assert first.columns == prompt + 6 + 40  # the last of the decoded tokens is read with the turn
    for budget_of, tokens in (("context", first.columns // 2), ("prompt", prompt // 2)):
        cache = two_turns(model, snapkv(), keep_text=False, budget_of=budget_of)
        assert (kept(cache).sum(-1) == tokens).all()
    cache = two_turns(model, snapkv(20), keep_text=False, budget_of="prompt")
    assert (kept(cache).sum(-1) == 20).all()


def test_a_number_of_tokens_grows_into_its_budget() -> None:
    """A first prompt shorter than the budget does not bound what later blocks may store."""
    model = matrix.model("llava", torch.float64)
    short = families.encode("llava", [Row((4, Picture(seed=1), 3))], torch.float64)
    for budget_of in ("context", "prompt"):
        cache = two_turns(model, snapkv(60), new=80, first=short, keep_text=False, budget_of=budget_of)
        assert (kept(cache).sum(-1) == 60).all()


def test_text_of_earlier_turns_stays_unless_told_otherwise() -> None:
    model = matrix.model("llava", torch.float64)
    before = two_turns(model, snapkv(0.6), turns="store")
    for keep_text in (None, True, False):
        cache = two_turns(model, snapkv(0.6), keep_text=keep_text)
        columns = cache.seen - 41  # the last decoded token is read with the turn
        text = cache.full_prompt.text[0, :columns]
        was, now = kept(before)[..., :columns][..., text], kept(cache)[..., :columns][..., text]
        assert torch.equal(was, now) == (keep_text is not False)
        # Text that stays is stored in addition to the budget, and the budget is a share of the rest.
        protected = text if keep_text is not False else torch.zeros_like(text)
        free = kept(cache)
        free[..., :columns] &= ~protected
        assert (free.sum(-1) == int(0.6 * (cache.seen - int(protected.sum())))).all()


@pytest.mark.parametrize("pinned", ["system", "first", 5])
def test_anchors_stay(pinned: Any) -> None:
    model = matrix.model("llava", torch.float64)
    before = kept(two_turns(model, snapkv(0.6), turns="store"))
    cache = two_turns(model, snapkv(8), keep_text=False, pinned=pinned)
    prompt = cache.full_prompt
    width = {"system": int(prompt.first_visual[0]), "first": families.prompt("llava")["input_ids"].shape[1], 5: 5}
    small = kept(two_turns(model, snapkv(8), turns="store"))
    assert torch.equal(kept(cache)[..., : width[pinned]], small[..., : width[pinned]])
    assert not torch.equal(before, small)
    loose = kept(two_turns(model, snapkv(8), keep_text=False))
    assert not torch.equal(loose[..., : width["first"]], small[..., : width["first"]])


def test_system_text_needs_an_image_in_the_first_block() -> None:
    model, argument = matrix.model("llama", torch.float64), matrix.cache_argument("llama")
    cache = foveakv.cache_for(model, snapkv(), pinned="system")
    model(input_ids=torch.tensor([families.words(20, 0)]), **{argument: cache})
    with pytest.raises(errors.MethodError, match="first block has no image"):
        model(input_ids=torch.tensor([families.words(20, 1)]), **{argument: cache})
    seen = cache.seen
    model(input_ids=torch.tensor([[11]]), **{argument: cache})  # the refused pass has changed nothing
    assert cache.seen == seen + 1


def test_stored_turns_are_as_with_a_method_that_keeps_them() -> None:
    model = matrix.model("llava", torch.float64)
    cache = two_turns(model, snapkv(), turns="store")
    assert [block.decided for block in cache.blocks] == ["context", "keep"]
    assert kept(cache)[..., -40:].all()


@pytest.mark.parametrize(
    "given",
    [
        {"turns": "drop"},
        {"turns": True},
        {"chunks": "yes"},
        {"budget_of": "all"},
        {"keep_text": "yes"},
        {"pinned": "last"},
        {"pinned": 0},
        {"pinned": 1.5},
        {"pinned": True},
        {"preallocate": 4, "turns": "compress"},
        {"preallocate": 4, "chunks": "compress"},
    ],
)
def test_values_that_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(errors.MethodError):
        CacheOptions(**given)


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("full", {"turns": "compress"}),
        ("full", {"chunks": "compress"}),
        ("h2o", {"keep_text": True}),
        ("streaming", {"pinned": "first"}),
    ],
)
def test_options_that_a_method_cannot_have(name: str, given: dict[str, Any]) -> None:
    with pytest.raises(errors.MethodError, match=name):
        foveakv.compress(matrix.model("llama"), matrix.method(name), **given)


def test_the_report_has_every_block() -> None:
    model = matrix.model("llava", torch.float64)
    with foveakv.compress(model, snapkv(0.3)) as session:
        session.feed(**families.prompt("llava", dtype=torch.float64))
        session.feed(input_ids=torch.tensor([families.words(30, 0)]))
        report = session.report
    first, second = report.blocks
    assert (first.kind, second.kind) == ("prompt", "feed")
    assert second.tokens == 30
    assert second.stored_slots == report.stored_slots
    assert second.evicted + first.evicted == report.evicted
    assert second.stored_bytes <= second.peak_bytes <= report.peak_bytes
    assert report.full_slots == report.stored_slots + report.evicted
    assert report.to_dict()["blocks"][1]["kind"] == "feed"
    assert "2; the newest (feed) of 30 tokens" in str(report)


def test_quantized_slots_of_earlier_blocks_stay_as_they_are() -> None:
    """A block that evicts nothing leaves the tokens of a quantized cache as they would be without it."""
    model = matrix.model("llava", torch.float64)
    logits = []
    for turns in ("store", "compress"):
        with recorded(model) as steps:
            two_turns(model, foveakv.methods.get("snapkv", budget=1.0), kv_dtype="int8", residual_length=4, turns=turns)
        logits.append(steps)
    assert largest_difference(*logits) < 1e-9

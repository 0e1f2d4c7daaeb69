"""`session.feed`: blocks without generation, one context over many of them."""

from __future__ import annotations

from typing import Any

import families
import matrix
import pytest
import second_passes
import talks
import torch
from families.rows import Picture, Row
from modes import inputs_of

import foveakv
from foveakv import errors

pytestmark = pytest.mark.usefixtures("no_gradients")

FAMILIES = ["llava", "internvl", "gemma3", "llama"]  # models with M-RoPE need positions, see below
SPEAK = {**matrix.GREEDY, "max_new_tokens": 4}


def blocks_of(family: str, count: int, batch: int = 2) -> list[dict[str, Any]]:
    """Blocks of an image (or a few words) and some words."""
    made = []
    for step in range(count):
        parts: list[Any] = [5, Picture(seed=step), 2] if family not in families.TEXT else [9]
        made.append(families.encode(family, [Row(tuple(parts), step * 10 + b) for b in range(batch)], torch.float64))
    return made


def reading(family: str, model: Any, feeds: list[dict[str, Any]]) -> talks.Say:
    """Feed all blocks, to the session or to a plain cache, then generate after three more words."""
    argument = matrix.cache_argument(family)
    ids = torch.cat([feed["input_ids"] for feed in feeds] + [torch.tensor([[31, 32, 33], [41, 42, 43]])], 1)

    def say(session: Any) -> None:
        cache: Any = None
        for feed in feeds:
            inputs = {key: value for key, value in feed.items() if key != "attention_mask"}
            if session is not None:
                session.feed(**inputs)
                cache = session.cache
            else:
                past = {} if cache is None else {argument: cache}
                cache = matrix.cache_of(model(**inputs, **past, use_cache=True, logits_to_keep=1))
        model.generate(input_ids=ids, **families.token_types(family, ids), **SPEAK, **{argument: cache})

    return say


@pytest.mark.parametrize("name", matrix.METHODS)
@pytest.mark.parametrize("family", FAMILIES)
def test_five_blocks(family: str, name: str) -> None:
    model, method = matrix.model(family, torch.float64), matrix.method(name)
    if method.visual_only and family in families.TEXT:
        pytest.skip("evicts visual tokens only")
    if second_passes.refused(family, name):
        pytest.skip("refused, see test_families.py")
    say = reading(family, model, blocks_of(family, 5))
    talk = talks.compressed(model, method, say)
    talks.check(model, talk, say)
    assert [block.kind for block in talk.cache.blocks] == ["prompt", *["feed"] * 4, "turn"]


@pytest.mark.parametrize("name", ["snapkv", "hae", "hybridkv"])
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_positions_of_models_with_three_axes(family: str, name: str) -> None:
    """Fed with positions, then continued without: as if the context had been read at once."""
    model, argument = matrix.model(family, torch.float64), matrix.cache_argument(family)
    feeds = blocks_of(family, 3, batch=1)
    ids = torch.cat([feed["input_ids"] for feed in feeds], 1)
    grids = torch.cat([feed["image_grid_thw"] for feed in feeds])
    types = families.token_types(family, ids)["mm_token_type_ids"]
    positions, _ = model.model.get_rope_index(ids, image_grid_thw=grids, mm_token_type_ids=types)
    question = torch.tensor([[31, 32, 33]])
    method = matrix.method(name)

    def say(session: Any) -> None:
        cache: Any = None
        pieces = positions.split([feed["input_ids"].shape[1] for feed in feeds], -1)
        for feed, piece in zip(feeds, pieces, strict=True):
            inputs = {key: value for key, value in feed.items() if key != "attention_mask"} | {"position_ids": piece}
            if session is not None:
                session.feed(**inputs)
                cache = session.cache
            else:
                past = {} if cache is None else {argument: cache}
                cache = matrix.cache_of(model(**inputs, **past, use_cache=True, logits_to_keep=1))
        if session is not None:
            session.feed(input_ids=question)
            model(input_ids=torch.tensor([[34]]), **{argument: session.cache})
            return
        end = int(positions.max()) + 1
        for step in (question, torch.tensor([[34]])):
            place = torch.arange(end, end + step.shape[1]).expand(3, 1, -1)
            model(input_ids=step, position_ids=place, **{argument: cache}, logits_to_keep=1)
            end += step.shape[1]

    talks.check(model, talks.compressed(model, method, say), say)


def test_images_without_positions_are_refused_where_they_are_needed() -> None:
    model = matrix.model("qwen2_5_vl", torch.float64)
    first, second = blocks_of("qwen2_5_vl", 2, batch=1)
    with foveakv.compress(model, matrix.method("snapkv")) as session:
        session.feed(**first)
        seen = session.cache.seen
        with pytest.raises(errors.UnsupportedModeError, match="pass position_ids"):
            session.feed(**second)
        assert session.cache.seen == seen
        session.feed(input_ids=torch.tensor([[31, 32]]))
        assert session.cache.seen == seen + 2


@pytest.mark.parametrize("name", matrix.METHODS)
def test_masks_of_blocks(name: str) -> None:
    """A mask of the block or of the whole context; padding of earlier blocks is remembered."""
    model, argument = matrix.model("llava", torch.float64), matrix.cache_argument("llava")
    inputs = inputs_of("llava")
    words = torch.tensor([families.words(6, seed) for seed in range(3)])
    mask = torch.tensor([[1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1], [0, 1, 1, 0, 1, 1]])
    whole = torch.cat([inputs["attention_mask"], mask], 1)

    def say(given: torch.Tensor) -> talks.Say:
        def run(session: Any) -> None:
            end = torch.ones(3, 1, dtype=torch.long)
            if session is not None:
                session.feed(**inputs)
                session.feed(input_ids=words, attention_mask=given)
                session.feed(input_ids=words[:, :1])
                return
            cache = matrix.cache_of(model(**inputs, use_cache=True, logits_to_keep=1))
            model(input_ids=words, attention_mask=whole, **{argument: cache}, logits_to_keep=1)
            longer = torch.cat([whole, end], 1)
            model(input_ids=words[:, :1], attention_mask=longer, **{argument: cache}, logits_to_keep=1)

        return run

    for given in (mask, whole):
        talks.check(model, talks.compressed(model, matrix.method(name), say(given)), say(given), rows="last")


def test_what_cannot_be_fed() -> None:
    model = matrix.model("llava", torch.float64)
    session = foveakv.compress(model, matrix.method("snapkv"))
    with pytest.raises(errors.CacheInUseError, match="not open"):
        session.feed(input_ids=torch.tensor([[11, 12]]))
    with session:
        session.feed(input_ids=torch.tensor([families.words(20, 0)]))
        with pytest.raises(errors.InputError, match="does not fit a block"):
            session.feed(input_ids=torch.tensor([[11, 12]]), attention_mask=torch.ones(1, 3))
        with pytest.raises(errors.CacheInUseError, match="1 sequences, but the inputs have 2"):
            session.feed(input_ids=torch.tensor([[11, 12], [13, 14]]))
        assert session.cache.seen == 20

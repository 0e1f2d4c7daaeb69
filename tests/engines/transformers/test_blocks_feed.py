"""`session.feed`: blocks without generation, one context over many of them."""

from __future__ import annotations

from typing import Any

import families
import matrix
import pytest
import talks
import torch
from families.rows import Picture, Row

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
    say = reading(family, model, blocks_of(family, 5))
    talk = talks.compressed(model, method, say)
    talks.check(model, talk, say)
    assert [block.kind for block in talk.cache.blocks] == ["prompt", *["feed"] * 4, "turn"]

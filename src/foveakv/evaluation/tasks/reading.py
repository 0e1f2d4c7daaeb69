"""Replies about all images, so that attention moves over them: a row or a grid read out, and a long row described."""

from __future__ import annotations

import functools

import numpy as np
from PIL.Image import Image

from foveakv.evaluation.items import Task, Turn
from foveakv.evaluation.tasks.drawn import card_line, row
from foveakv.models.embedded.samples import ALL_CARDS, STORY

SHORT, GRID, LONG = 6, 9, 16


def make_list(rng: np.random.Generator, count: int, split: str) -> tuple[tuple[Image, ...], tuple[Turn, ...]]:
    """Draws one item: the reply lists all digits in order (a grid row by row, one image per tile).

    The first token of the reply is the first digit, so that digit does not count.
    """
    images, _, digits, prompt = row(rng, count, split)
    return images, (Turn(prompt + ALL_CARDS, tuple(digits), ", ", ordered=True, uncounted=1, max_new_tokens=4 * count),)


def make_story(rng: np.random.Generator, split: str) -> tuple[tuple[Image, ...], tuple[Turn, ...]]:
    """Draws one item: the reply names every card of a long row, in over a hundred tokens."""
    images, names, digits, prompt = row(rng, LONG, split)
    facts = tuple(card_line(name, digit) for name, digit in zip(names, digits, strict=True))
    return images, (Turn(prompt + STORY, facts, max_new_tokens=10 * LONG),)


def build(split: str, suffix: str) -> list[Task]:
    """The tasks for one split of the data; `suffix` ends their names."""
    lists = (("row", SHORT, f"a row of {SHORT} cards read out"), ("reading", GRID, "a 3 x 3 grid read out"))
    story = functools.partial(make_story, split=split)
    return [
        *(
            Task(name + suffix, title, functools.partial(make_list, count=n, split=split), group="list")
            for name, n, title in lists
        ),
        Task(f"story{suffix}", f"{LONG} cards described one after another", story, long=True, group="list"),
    ]

"""Attention moves over the pictures while decoding: a row or a grid read out, and the story of a long row."""

from __future__ import annotations

import functools

import numpy as np
from PIL.Image import Image

from foveakv.evaluation.items import Task, Turn, register
from foveakv.evaluation.tasks.drawn import row, told
from foveakv.models.embedded.samples import ALL_CARDS, STORY

SHORT, GRID, LONG = 6, 9, 16


def make_list(rng: np.random.Generator, count: int, split: str) -> tuple[tuple[Image, ...], tuple[Turn, ...]]:
    """All digits in order; a grid is read row by row, each of its tiles a picture."""
    pictures, _, digits, shown = row(rng, count, split)
    return pictures, (Turn(shown + ALL_CARDS, tuple(digits), ", ", ordered=True, max_new_tokens=4 * count),)


def make_story(rng: np.random.Generator, split: str) -> tuple[tuple[Image, ...], tuple[Turn, ...]]:
    """Every card of a long row with its name, over a hundred tokens."""
    pictures, names, digits, shown = row(rng, LONG, split)
    facts = tuple(told(name, digit) for name, digit in zip(names, digits, strict=True))
    return pictures, (Turn(shown + STORY, facts, max_new_tokens=10 * LONG),)


def register_all(split: str, mark: str) -> None:
    for name, count, title in (
        ("row", SHORT, f"a row of {SHORT} read out"),
        ("reading", GRID, "a 3 x 3 grid read out"),
    ):
        register(Task(f"{name}{mark}", title, functools.partial(make_list, count=count, split=split)))
    story = functools.partial(make_story, split=split)
    register(Task(f"story{mark}", f"{LONG} cards told one after the other", story, long=True))

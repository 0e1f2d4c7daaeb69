"""Attention moves over the pictures while decoding: a grid read out, and the story of a long row."""

from __future__ import annotations

import functools

import numpy as np
from PIL.Image import Image

from foveakv.embedded.samples import ALL_CARDS, STORY
from foveakv.evaluation.items import Task, Turn, register
from foveakv.evaluation.tasks.drawn import row, told

GRID, ROW = 9, 16


def make_grid(rng: np.random.Generator, split: str) -> tuple[tuple[Image, ...], tuple[Turn, ...]]:
    """A grid of 3 x 3 tiles, each a picture, read out row by row."""
    pictures, _, digits, shown = row(rng, GRID, split)
    return pictures, (Turn(shown + ALL_CARDS, tuple(digits), ", ", ordered=True, max_new_tokens=4 * GRID),)


def make_story(rng: np.random.Generator, split: str) -> tuple[tuple[Image, ...], tuple[Turn, ...]]:
    """Every card of a long row with its name, over a hundred tokens."""
    pictures, names, digits, shown = row(rng, ROW, split)
    facts = tuple(told(name, digit) for name, digit in zip(names, digits, strict=True))
    return pictures, (Turn(shown + STORY, facts, max_new_tokens=10 * ROW),)


def register_all(split: str, mark: str) -> None:
    register(Task(f"reading{mark}", "a 3 x 3 grid read out", functools.partial(make_grid, split=split)))
    story = functools.partial(make_story, split=split)
    register(Task(f"story{mark}", f"{ROW} cards told one after the other", story, long=True))

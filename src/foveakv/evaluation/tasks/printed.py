"""Rendered text: the question asks for one of several printed characters."""

from __future__ import annotations

import functools

import numpy as np
from PIL.Image import Image

from foveakv.evaluation import cards
from foveakv.evaluation.items import Task, Turn
from foveakv.evaluation.tasks.drawn import ask_one

CARDS = 8


def make(rng: np.random.Generator, split: str) -> tuple[tuple[Image, ...], tuple[Turn, ...]]:
    """Draws one item: printed characters, and a question about one of them."""
    names = cards.names(rng, CARDS)
    characters = [cards.CHARACTERS[i] for i in rng.integers(len(cards.CHARACTERS), size=CARDS)]
    images = tuple(cards.print_card(rng, character, split) for character in characters)
    return images, (ask_one(names, characters, int(rng.integers(CARDS))),)


def build(split: str, suffix: str) -> list[Task]:
    """The task for one split of the data; `suffix` ends its name."""
    title = f"one of {CARDS} printed characters"
    return [Task(f"print{suffix}", title, functools.partial(make, split=split), group="needle")]

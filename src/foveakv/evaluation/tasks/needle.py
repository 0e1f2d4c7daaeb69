"""A needle among images: the question asks for one of n cards."""

from __future__ import annotations

import functools

import numpy as np
from PIL.Image import Image

from foveakv.evaluation.items import Task, Turn
from foveakv.evaluation.tasks.drawn import ask_one, row


def make(rng: np.random.Generator, count: int, split: str) -> tuple[tuple[Image, ...], tuple[Turn, ...]]:
    """Draws one item: `count` cards, and a question about one of them."""
    images, names, digits, _ = row(rng, count, split)
    return images, (ask_one(names, digits, int(rng.integers(count))),)


def build(split: str, suffix: str) -> list[Task]:
    """The tasks for one split of the data; `suffix` ends their names."""
    titles = {1: "a single card", 4: "one of 4 cards", 16: "one of 16 cards"}
    return [
        Task(f"cards-{count}{suffix}", title, functools.partial(make, count=count, split=split), group="needle")
        for count, title in titles.items()
    ]

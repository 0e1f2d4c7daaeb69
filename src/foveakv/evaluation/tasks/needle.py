"""One of n cards is asked for: a needle among images."""

from __future__ import annotations

import functools

import numpy as np
from PIL.Image import Image

from foveakv.embedded.samples import TELL
from foveakv.evaluation.items import Task, Turn, register
from foveakv.evaluation.tasks.drawn import row, told


def make(rng: np.random.Generator, count: int, split: str) -> tuple[tuple[Image, ...], tuple[Turn, ...]]:
    pictures, names, digits, shown = row(rng, count, split)
    place = int(rng.integers(count))
    return pictures, (Turn(shown + TELL.format(names[place]), (told(names[place], digits[place]),)),)


def register_all(split: str, mark: str) -> None:
    for count in (1, 4, 16):
        title = f"one of {count} cards" if count > 1 else "a single card"
        register(Task(f"cards-{count}{mark}", title, functools.partial(make, count=count, split=split)))

"""One of n cards is asked for: a needle among images."""

from __future__ import annotations

import functools

import numpy as np
from PIL.Image import Image

from foveakv.evaluation.items import Task, Turn, register
from foveakv.evaluation.tasks.drawn import ask_one, row


def make(rng: np.random.Generator, count: int, split: str) -> tuple[tuple[Image, ...], tuple[Turn, ...]]:
    pictures, names, digits, _ = row(rng, count, split)
    return pictures, (ask_one(names, digits, int(rng.integers(count))),)


def register_all(split: str, mark: str) -> None:
    for count in (1, 4, 16):
        title = f"one of {count} cards" if count > 1 else "a single card"
        register(Task(f"cards-{count}{mark}", title, functools.partial(make, count=count, split=split)))

"""A needle among real images: one of a few cards, mixed with photographs as distractors."""

from __future__ import annotations

import functools

import numpy as np
from PIL.Image import Image

from foveakv.evaluation import cards
from foveakv.evaluation.items import Task, Turn
from foveakv.evaluation.tasks.drawn import ask_one

CARDS, PHOTOS = 4, 12


def make(rng: np.random.Generator, split: str) -> tuple[tuple[Image, ...], tuple[Turn, ...]]:
    """Draws one item: cards and photographs in random order, and a question about one card."""
    count = CARDS + PHOTOS
    names = cards.names(rng, count)
    places = [int(place) for place in rng.permutation(count)[:CARDS]]
    answers = [""] * count
    images = []
    for place in range(count):
        if place in places:
            digit = int(rng.integers(10))
            answers[place] = str(digit)
            images.append(cards.digit_card(rng, digit, split))
        else:
            images.append(cards.photograph(rng, split))
    return tuple(images), (ask_one(names, answers, places[0]),)


def build(split: str, suffix: str) -> list[Task]:
    """The task for one split of the data; `suffix` ends its name."""
    title = f"one of {CARDS} cards among {PHOTOS} photographs"
    return [Task(f"photos{suffix}", title, functools.partial(make, split=split), group="needle")]

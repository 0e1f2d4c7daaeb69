"""A needle among real pictures: one of a few cards between photographs, which nobody asks about."""

from __future__ import annotations

import functools

import numpy as np
from PIL.Image import Image

from foveakv.evaluation import cards
from foveakv.evaluation.items import Task, Turn, register
from foveakv.evaluation.tasks.drawn import ask_one

CARDS, PHOTOS = 4, 12


def make(rng: np.random.Generator, split: str) -> tuple[tuple[Image, ...], tuple[Turn, ...]]:
    count = CARDS + PHOTOS
    names = cards.names(rng, count)
    places = [int(place) for place in rng.permutation(count)[:CARDS]]
    answers = [""] * count
    pictures = []
    for place in range(count):
        if place in places:
            digit = int(rng.integers(10))
            answers[place] = str(digit)
            pictures.append(cards.digit_card(rng, digit, split))
        else:
            pictures.append(cards.photograph(rng, split))
    return tuple(pictures), (ask_one(names, answers, places[0]),)


def register_all(split: str, mark: str) -> None:
    title = f"one of {CARDS} cards between {PHOTOS} photographs"
    register(Task(f"photos{mark}", title, functools.partial(make, split=split)))

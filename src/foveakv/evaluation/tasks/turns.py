"""Several questions about the same cards, one turn each: what the first question did not need may be gone."""

from __future__ import annotations

import functools

import numpy as np
from PIL.Image import Image

from foveakv.evaluation.items import Task, Turn, register
from foveakv.evaluation.tasks.drawn import row, told
from foveakv.models.embedded.samples import TELL

CARDS, QUESTIONS = 8, 3


def make(rng: np.random.Generator, split: str) -> tuple[tuple[Image, ...], tuple[Turn, ...]]:
    pictures, names, digits, shown = row(rng, CARDS, split)
    places = rng.permutation(CARDS)[:QUESTIONS]
    questions = [Turn(TELL.format(names[i]), (told(names[i], digits[i]),)) for i in places]
    first = Turn(shown + questions[0].text, questions[0].facts)
    return pictures, (first, *questions[1:])


def register_all(split: str, mark: str) -> None:
    title = f"{QUESTIONS} questions about {CARDS} cards, a turn each"
    register(Task(f"turns{mark}", title, functools.partial(make, split=split)))

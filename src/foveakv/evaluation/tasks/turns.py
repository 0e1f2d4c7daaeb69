"""Several questions about the same cards, one per turn: later ones may need what was evicted after the first."""

from __future__ import annotations

import functools

import numpy as np
from PIL.Image import Image

from foveakv.evaluation.items import Task, Turn
from foveakv.evaluation.tasks.drawn import card_line, row
from foveakv.models.embedded.samples import TELL

CARDS, QUESTIONS = 8, 3


def make(rng: np.random.Generator, split: str) -> tuple[tuple[Image, ...], tuple[Turn, ...]]:
    """Draws one item: a row of cards, and questions about some of them."""
    images, names, digits, prompt = row(rng, CARDS, split)
    places = rng.permutation(CARDS)[:QUESTIONS]
    questions = [Turn(TELL.format(names[i]), (card_line(names[i], digits[i]),)) for i in places]
    first = Turn(prompt + questions[0].text, questions[0].facts)
    return images, (first, *questions[1:])


def build(split: str, suffix: str) -> list[Task]:
    """The task for one split of the data; `suffix` ends its name."""
    title = f"{QUESTIONS} questions about {CARDS} cards, one per turn"
    return [Task(f"turns{suffix}", title, functools.partial(make, split=split), group="list")]

"""A few named cards among many photographs without captions: long prompts that are nearly all images.

Text is two to three percent of these prompts, as in the papers' experiments with several images, so that small budgets
have to choose among visual tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from PIL.Image import Image

from foveakv.evaluation import cards
from foveakv.evaluation.items import Task, Turn
from foveakv.evaluation.tasks.drawn import card_line
from foveakv.models.embedded.samples import TELL

CARDS = 4
SIZES = (32, 64)
"""Numbers of images."""

Drawn = tuple[tuple[Image, ...], list[str], list[str], str]


def album(rng: np.random.Generator, count: int, split: str) -> Drawn:
    """(`count` images in random order, the cards' names and digits in order, the prompt that shows the images)."""
    names = cards.names(rng, CARDS)
    places = sorted(int(place) for place in rng.permutation(count)[:CARDS])
    images: list[Image] = []
    digits: list[str] = []
    lines = []
    for place in range(count):
        if place in places:
            digit = int(rng.integers(10))
            lines.append(f"{names[len(digits)]}'s card: <image>\n")
            digits.append(str(digit))
            images.append(cards.digit_card(rng, digit, split))
        else:
            lines.append("<image>\n")
            images.append(cards.photograph(rng, split))
    return tuple(images), names, digits, "".join(lines)


def make_needle(rng: np.random.Generator, count: int, split: str) -> tuple[tuple[Image, ...], tuple[Turn, ...]]:
    """Draws one item: a question about one of the cards."""
    images, names, digits, prompt = album(rng, count, split)
    place = int(rng.integers(CARDS))
    return images, (Turn(prompt + TELL.format(names[place]), (card_line(names[place], digits[place]),)),)


def make_list(rng: np.random.Generator, count: int, split: str) -> tuple[tuple[Image, ...], tuple[Turn, ...]]:
    """Draws one item: the reply lists all cards in order, with their names."""
    images, names, digits, prompt = album(rng, count, split)
    facts = tuple(card_line(name, digit) for name, digit in zip(names, digits, strict=True))
    return images, (Turn(prompt + TELL.format(", ".join(names)), facts, max_new_tokens=12 * CARDS),)


def make_turns(rng: np.random.Generator, count: int, split: str) -> tuple[tuple[Image, ...], tuple[Turn, ...]]:
    """Draws one item: three questions about different cards, one per turn."""
    images, names, digits, prompt = album(rng, count, split)
    places = rng.permutation(CARDS)[:3]
    questions = [Turn(TELL.format(names[i]), (card_line(names[i], digits[i]),)) for i in places]
    first = Turn(prompt + questions[0].text, questions[0].facts)
    return images, (first, *questions[1:])


def build(split: str, suffix: str) -> list[Task]:
    """The tasks for one split of the data; `suffix` ends their names."""
    forms: tuple[tuple[str, str, Callable[..., Any]], ...] = (
        ("album", "one of {} cards", make_needle),
        ("album-list", "{} cards read out", make_list),
        ("album-turns", "3 questions about {} cards, one per turn,", make_turns),
    )
    return [
        Task(
            f"{name}-{count}{suffix}",
            f"{title.format(CARDS)} among {count - CARDS} photographs without captions",
            functools.partial(make, count=count, split=split),
            group="album",
        )
        for count in SIZES
        for name, title, make in forms
    ]

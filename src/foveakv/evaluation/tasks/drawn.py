"""Shared by the tasks with cards: a row of named cards, the prompt that shows it, and the form of an answer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from PIL.Image import Image

from foveakv.evaluation import cards
from foveakv.evaluation.items import Turn
from foveakv.models.embedded.samples import TELL


def row(rng: np.random.Generator, count: int, split: str) -> tuple[tuple[Image, ...], list[str], list[str], str]:
    """(images of `count` cards, their names, their digits, the prompt that shows them)."""
    names = cards.names(rng, count)
    digits = [int(digit) for digit in rng.integers(10, size=count)]
    images = tuple(cards.digit_card(rng, digit, split) for digit in digits)
    return images, names, [str(digit) for digit in digits], show(names)


def show(names: Sequence[str]) -> str:
    """The prompt that shows a row of cards: one line per card, each with an `<image>` mark."""
    return "".join(f"{name}'s card: <image>\n" for name in names)


def card_line(name: str, answer: str) -> str:
    """The line of a reply about one card."""
    return f"{name}'s card: {answer}"


def ask_one(names: Sequence[str], answers: Sequence[str], place: int) -> Turn:
    """A turn that shows a row of cards and asks for the one at an index."""
    return Turn(show(names) + TELL.format(names[place]), (card_line(names[place], answers[place]),))

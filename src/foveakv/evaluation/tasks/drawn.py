"""What the tasks with cards share: a row of named cards and how a card is told."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from PIL.Image import Image

from foveakv.evaluation import cards
from foveakv.evaluation.items import Turn
from foveakv.models.embedded.samples import TELL


def row(rng: np.random.Generator, count: int, split: str) -> tuple[tuple[Image, ...], list[str], list[str], str]:
    """Cards, their names, their digits, and the text that shows them: a line with an `<image>` mark for each."""
    names = cards.names(rng, count)
    digits = [int(digit) for digit in rng.integers(10, size=count)]
    pictures = tuple(cards.digit_card(rng, digit, split) for digit in digits)
    return pictures, names, [str(digit) for digit in digits], shown(names)


def shown(names: Sequence[str]) -> str:
    """The text that shows a row of cards."""
    return "".join(f"{name}'s card: <image>\n" for name in names)


def told(name: str, answer: str) -> str:
    """How a reply tells a card."""
    return f"{name}'s card: {answer}"


def ask_one(names: Sequence[str], answers: Sequence[str], place: int) -> Turn:
    """Shows a row and asks for the card at a place."""
    return Turn(shown(names) + TELL.format(names[place]), (told(names[place], answers[place]),))

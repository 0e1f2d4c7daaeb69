"""The control without images: the question asks for one of many written lines."""

from __future__ import annotations

import numpy as np
from PIL.Image import Image

from foveakv.evaluation import cards
from foveakv.evaluation.items import Task, Turn
from foveakv.evaluation.tasks.drawn import card_line
from foveakv.models.embedded.samples import TELL

LINES = 16


def make(rng: np.random.Generator) -> tuple[tuple[Image, ...], tuple[Turn, ...]]:
    """Draws one item: written lines, and a question about one of them."""
    names = cards.names(rng, LINES)
    numbers = [str(number) for number in rng.integers(1000, size=LINES)]
    lines = [card_line(name, number) for name, number in zip(names, numbers, strict=True)]
    place = int(rng.integers(LINES))
    text = "".join(f"{line}\n" for line in lines) + TELL.format(names[place])
    return (), (Turn(text, (lines[place],)),)


def build(split: str, suffix: str) -> list[Task]:
    """The task for one split of the data, whose lines are the same; `suffix` ends its name."""
    return [Task(f"text{suffix}", f"one of {LINES} written lines, no images", make, ranked=False)]

"""The control without pictures: one of many written lines is asked for."""

from __future__ import annotations

import numpy as np
from PIL.Image import Image

from foveakv.evaluation import cards
from foveakv.evaluation.items import Task, Turn, register
from foveakv.evaluation.tasks.drawn import told
from foveakv.models.embedded.samples import TELL

LINES = 16


def make(rng: np.random.Generator) -> tuple[tuple[Image, ...], tuple[Turn, ...]]:
    names = cards.names(rng, LINES)
    numbers = [str(number) for number in rng.integers(1000, size=LINES)]
    lines = [told(name, number) for name, number in zip(names, numbers, strict=True)]
    place = int(rng.integers(LINES))
    text = "".join(f"{line}\n" for line in lines) + TELL.format(names[place])
    return (), (Turn(text, (lines[place],)),)


def register_all(mark: str) -> None:
    register(Task(f"text{mark}", f"one of {LINES} written lines, no pictures", make, ranked=False))

"""Rendered text: one of several printed characters is asked for."""

from __future__ import annotations

import functools

import numpy as np
from PIL.Image import Image

from foveakv.evaluation import cards
from foveakv.evaluation.items import Task, Turn, register
from foveakv.evaluation.tasks.drawn import ask_one

CARDS = 8


def make(rng: np.random.Generator, split: str) -> tuple[tuple[Image, ...], tuple[Turn, ...]]:
    names = cards.names(rng, CARDS)
    characters = [cards.CHARACTERS[i] for i in rng.integers(len(cards.CHARACTERS), size=CARDS)]
    pictures = tuple(cards.print_card(rng, character, split) for character in characters)
    return pictures, (ask_one(names, characters, int(rng.integers(CARDS))),)


def register_all(split: str, mark: str) -> None:
    register(Task(f"print{mark}", f"one of {CARDS} printed characters", functools.partial(make, split=split)))

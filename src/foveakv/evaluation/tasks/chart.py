"""A bar chart, a picture for each of its columns: one value is asked for."""

from __future__ import annotations

import functools

import numpy as np
from PIL.Image import Image

from foveakv.evaluation import cards
from foveakv.evaluation.items import Task, Turn, register
from foveakv.evaluation.tasks.drawn import ask_one

COLUMNS = 8


def make(rng: np.random.Generator, split: str) -> tuple[tuple[Image, ...], tuple[Turn, ...]]:
    names = cards.names(rng, COLUMNS)
    values = [int(value) for value in rng.integers(10, size=COLUMNS)]
    style, shapes = cards.chart_style(rng), cards.print_glyphs(split)
    pictures = tuple(cards.chart_column(value, style, shapes) for value in values)
    return pictures, (ask_one(names, [str(value) for value in values], int(rng.integers(COLUMNS))),)


def register_all(split: str, mark: str) -> None:
    title = f"one of a bar chart's {COLUMNS} columns"
    register(Task(f"chart{mark}", title, functools.partial(make, split=split)))

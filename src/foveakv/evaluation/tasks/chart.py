"""A bar chart with one image per column; the question asks for one value."""

from __future__ import annotations

import functools

import numpy as np
from PIL.Image import Image

from foveakv.evaluation import cards
from foveakv.evaluation.items import Task, Turn
from foveakv.evaluation.tasks.drawn import ask_one

COLUMNS = 8


def make(rng: np.random.Generator, split: str) -> tuple[tuple[Image, ...], tuple[Turn, ...]]:
    """Draws one item: all columns of a chart, and a question about one of them."""
    names = cards.names(rng, COLUMNS)
    values = [int(value) for value in rng.integers(10, size=COLUMNS)]
    style, shapes = cards.chart_style(rng), cards.print_glyphs(split)
    images = tuple(cards.chart_column(value, style, shapes) for value in values)
    return images, (ask_one(names, [str(value) for value in values], int(rng.integers(COLUMNS))),)


def build(split: str, suffix: str) -> list[Task]:
    """The task for one split of the data; `suffix` ends its name."""
    title = f"one of a bar chart's {COLUMNS} columns"
    return [Task(f"chart{suffix}", title, functools.partial(make, split=split), group="needle")]

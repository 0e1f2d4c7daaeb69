"""Samples for visual head scores: from the offline suite's cards, or from a folder of one's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from foveakv.analysis.head_scores import HeadSample, Target
from foveakv.evaluation.lines import prompt_of, read_lines
from foveakv.evaluation.tasks.drawn import row
from foveakv.models.embedded.samples import TELL

CARDS = 4
EXAMPLE = '{"prompt": "...", "images": ["a.png"], "targets": [{"text": "EXIT", "image": 0}]}'


def card_samples(count: int, seed: int = 0) -> list[HeadSample]:
    """One of four cards is asked for; the target is its digit, anywhere on its picture. Handwriting of `validation`."""
    samples = []
    for number in range(count):
        rng = np.random.default_rng([seed, number])
        pictures, names, digits, shown = row(rng, CARDS, "validation")
        place = int(rng.integers(CARDS))
        samples.append(HeadSample(shown + TELL.format(names[place]), pictures, [Target(digits[place], place)]))
    return samples


def read_samples(folder: Path) -> list[HeadSample]:
    """The samples of a folder: `samples.jsonl`, pictures relative to it, a line for each:

        {"prompt": "...", "images": ["a.png"], "targets": [{"text": "EXIT", "image": 0, "box": [0.1, 0.2, 0.5, 0.4]}]}

    InputError: the file is missing or empty, or a line is damaged; the message has its number.
    """

    def sample(number: int, entry: dict[str, Any]) -> HeadSample:
        targets = [
            Target(str(each["text"]), int(each.get("image", 0)), _box(each["box"]) if each.get("box") else None)
            for each in entry.get("targets", [])
        ]
        text, names = prompt_of(entry)
        if not names:
            raise TypeError("a sample has at least one picture")
        return HeadSample(text, [folder / name for name in names], targets)

    return read_lines(folder / "samples.jsonl", sample, ("prompt", "images", "targets"), EXAMPLE)


def _box(values: Any) -> tuple[float, float, float, float]:
    try:
        left, top, right, bottom = map(float, values)
    except (TypeError, ValueError):
        raise TypeError(f"a box is four numbers, left, top, right and bottom; got {values!r}") from None
    return left, top, right, bottom

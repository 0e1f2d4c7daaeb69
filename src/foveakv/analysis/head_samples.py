"""Samples for visual head scores, from the cards of the offline suite or from your own folder."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from foveakv.analysis.head_scores import HeadSample, Target
from foveakv.errors import InputError
from foveakv.evaluation.lines import PromptLine, read_lines
from foveakv.evaluation.schema import Count, Real
from foveakv.evaluation.tasks.drawn import row
from foveakv.models.embedded.samples import TELL
from foveakv.models.images import read_image

if TYPE_CHECKING:
    from PIL.Image import Image

CARDS = 4
EXAMPLE = '{"prompt": "...", "images": ["a.png"], "targets": [{"text": "EXIT", "image": 0}]}'


@dataclass(frozen=True)
class _TargetLine:
    text: str
    image: Count = 0
    box: tuple[Real, ...] | None = None


@dataclass(frozen=True)
class _Line(PromptLine):
    targets: tuple[_TargetLine, ...] = ()


def card_samples(count: int, seed: int = 0) -> list[HeadSample]:
    """Questions about one of four cards; the target is its digit, anywhere on its image. Uses the validation split."""
    samples = []
    for number in range(count):
        rng = np.random.default_rng([seed, number])
        images, names, digits, prompt = row(rng, CARDS, "validation")
        place = int(rng.integers(CARDS))
        samples.append(HeadSample(prompt + TELL.format(names[place]), images, [Target(digits[place], place)]))
    return samples


def read_samples(folder: Path, *, allow_urls: bool = False) -> list[HeadSample]:
    """The samples of a folder: `samples.jsonl`, one line per sample, with image files relative to the folder:

        {"prompt": "...", "images": ["a.png"], "targets": [{"text": "EXIT", "image": 0, "box": [0.1, 0.2, 0.5, 0.4]}]}

    Raises:
        InputError: the file is missing or empty, or a line or image is wrong; the message has its number.
    """

    def checked(name: str) -> Path | Image:
        image = read_image(name, folder=folder, allow_urls=allow_urls)
        path = folder / name
        return path if os.path.isfile(path) else image  # thousands of decoded images need too much memory

    def sample(number: int, line: _Line) -> HeadSample:
        if not line.images:
            raise InputError("a sample needs at least one image")
        targets = [Target(each.text, each.image, _box(each.box)) for each in line.targets]
        return HeadSample(line.prompt, [checked(name) for name in line.images], targets)

    return read_lines(folder / "samples.jsonl", _Line, sample, EXAMPLE)


def _box(values: tuple[float, ...] | None) -> tuple[float, float, float, float] | None:
    if not values:
        return None
    if len(values) != 4:
        raise InputError(f"a box has four numbers (left, top, right, bottom), got {list(values)}")
    left, top, right, bottom = values
    return left, top, right, bottom

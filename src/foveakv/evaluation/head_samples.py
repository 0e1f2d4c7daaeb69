"""Samples for visual head scores: from the offline suite's cards, or from a folder of one's own."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from foveakv.embedded.samples import TELL
from foveakv.errors import InputError
from foveakv.evaluation.tasks.drawn import row
from foveakv.head_scores import HeadSample, Target

CARDS = 4


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
    file = folder / "samples.jsonl"
    if not file.is_file():
        raise InputError(f"{file} is missing: one line with prompt, images and targets per sample")
    samples = []
    for number, line in enumerate(file.read_text(encoding="utf8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            targets = [
                Target(str(each["text"]), int(each.get("image", 0)), tuple(each["box"]) if each.get("box") else None)
                for each in entry.get("targets", [])
            ]
            samples.append(HeadSample(entry["prompt"], [folder / name for name in entry["images"]], targets))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InputError(f"{file}, line {number}: {type(error).__name__}: {error}") from error
    if not samples:
        raise InputError(f"{file} has no sample")
    return samples

"""Streams with known answers: named cards that come one by one, and questions after the last of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from foveakv.evaluation.grading import grade
from foveakv.evaluation.items import Turn
from foveakv.evaluation.tasks.drawn import card_line, row
from foveakv.models.embedded.samples import ALL_CARDS, TELL

if TYPE_CHECKING:
    from PIL.Image import Image

FRAMES = 16
"""Cards of a stream."""
TASKS = {
    "recall": "cards of the first half, by name",
    "latest": "the card of the last frame, by name (control)",
    "order": "all cards in order: share of digits at their place",
    "counting": "whether a list of all cards has as many entries as there were cards",
}
"""The kinds of questions."""


@dataclass(frozen=True)
class StreamItem:
    """A stream. captions: the text before each frame. questions: (a key of `TASKS`, the question and its answer)."""

    number: int
    frames: tuple[Image, ...]
    captions: tuple[str, ...]
    questions: tuple[tuple[str, Turn], ...]


def draw(number: int, seed: int = 0, split: str = "test", frames: int = FRAMES, recall: int = 4) -> StreamItem:
    """Draw stream `number`; equal arguments give equal streams.

    split: "test" or "validation", other handwriting. recall: questions about cards of the first half.
    """
    import numpy as np

    rng = np.random.default_rng([seed, number, *b"stream"])
    images, names, digits, _ = row(rng, frames, split)
    tell = [Turn(TELL.format(name), (card_line(name, digit),)) for name, digit in zip(names, digits, strict=True)]
    listed = Turn(ALL_CARDS, tuple(digits), separator=", ", ordered=True, max_new_tokens=4 * frames + 8)
    asked = sorted(int(place) for place in rng.permutation(frames // 2)[:recall])
    questions = [("recall", tell[place]) for place in asked]
    questions += [("latest", tell[-1]), ("order", listed), ("counting", listed)]
    return StreamItem(number, images, tuple(f"{name}'s card: " for name in names), tuple(questions))


def score(task: str, turn: Turn, reply: str) -> float:
    """The score of a reply, 0 to 1."""
    if task == "counting":
        return float(len(reply.strip().split(turn.separator.strip())) == len(turn.facts))
    return grade(turn, reply)

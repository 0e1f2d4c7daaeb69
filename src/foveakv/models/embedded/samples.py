"""Sample images and prompts for the embedded model. The handwriting on the cards was not in its training data."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from foveakv.errors import InputError
from foveakv.models.images import read_images

if TYPE_CHECKING:
    from PIL.Image import Image

FOLDER = Path(__file__).parents[1] / "data" / "samples"
ALL_CARDS = "All cards: "
STORY = "The story: "
"""Asks for all cards in order with their names; the answer looks like "Alice's card: 4; Bob's card: 8"."""
TELL = "Tell of {}: "
"""Asks for the cards of one or several people, "Tell of Bob, Alice: "; the answer looks like the story's."""


@dataclass(frozen=True)
class Sample:
    """A prompt with images and the right answer.

    paths: image files, in the order of the `<image>` marks in `text`. question: the last line of `text`. captions:
    one per image, "Alice's card: 472".
    """

    paths: list[Path]
    text: str
    question: str
    answer: str
    captions: list[str]

    @property
    def images(self) -> list[Image]:
        """The images, 112 x 112 RGB."""
        return read_images(self.paths)


def sample_prompt(images: int = 12, *, kind: str = "digit", ask: int | None = None) -> Sample:
    """Make a prompt about `images` cards.

    Args:
        images: number of cards, 1 to 16.
        kind: "digit" (one digit per card), "number" (three digits) or "word".
        ask: index of the card to ask for; -1 asks for all in order ("All cards: "); default: index images // 3.

    Raises:
        InputError: there is no such kind or card, or there are not that many images.
    """
    cards = json.loads((FOLDER / "samples.json").read_text(encoding="utf8"))
    if kind not in cards:
        raise InputError(f"no sample cards of kind {kind!r}; use {', '.join(cards)}")
    if not 1 <= images <= len(cards[kind]):
        raise InputError(f"the sample prompt has 1 to {len(cards[kind])} images, not {images}")
    if ask is not None and not -1 <= ask < images:
        raise InputError(f"ask is the index of a card, 0 to {images - 1}, or -1 for all; got {ask}")
    chosen = cards[kind][:images]
    if ask == -1:
        question, answer = ALL_CARDS, ", ".join(card["answer"] for card in chosen)
    else:
        card = chosen[images // 3 if ask is None else ask]
        question, answer = f"{card['name']}'s card: ", card["answer"]
    text = "".join(f"{card['name']}'s card: <image>\n" for card in chosen) + question
    captions = [f"{card['name']}'s card: {card['answer']}" for card in chosen]
    return Sample([FOLDER / card["file"] for card in chosen], text, question, answer, captions)

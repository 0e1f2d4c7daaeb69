"""Prompts that come with the package, for tuning without data of one's own."""

from __future__ import annotations

import numpy as np

from foveakv.evaluation import cards, tasks
from foveakv.evaluation.items import Item, Turn

EMBEDDED = ("cards-4", "photos", "reading", "turns")
"""Tasks for the embedded model, on the validation split."""
ITEMS = 8
"""Items per task by default."""
_QUESTIONS = (
    "Describe this image in detail.",
    "What are the most important objects here, and where are they?",
    "Describe what each of these images shows, one after another.",
    "What differs between these images?",
)


def embedded(per_task: int = ITEMS, seed: int = 0) -> list[Item]:
    """Items of tasks that the embedded model answers, `per_task` of each."""
    return of_tasks([f"{name}@validation" for name in EMBEDDED], per_task, seed)


def of_tasks(names: list[str], per_task: int, seed: int = 0) -> list[Item]:
    """The first items of tasks. InputError: there is no such task."""
    return [tasks.find(name).item(number, seed) for name in names for number in range(per_task)]


def general(count: int = 12, max_new_tokens: int = 48) -> list[Item]:
    """General questions about one to four photographs and cards, for any model."""
    found = []
    for number in range(count):
        rng = np.random.default_rng(number)
        question, several = _QUESTIONS[number % len(_QUESTIONS)], number % len(_QUESTIONS) >= 2
        images = [cards.photograph(rng, "validation") for _ in range(int(rng.integers(2, 4)) if several else 1)]
        if several:
            images.append(cards.digit_card(rng, int(rng.integers(10)), "validation"))
        turn = Turn(question, (), max_new_tokens=max_new_tokens)
        found.append(Item("built-in prompts", number, 0, tuple(images), (turn,)))
    return found

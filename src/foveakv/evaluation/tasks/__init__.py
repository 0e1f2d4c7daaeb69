"""The tasks by name, and the offline suite, which is generated from a seed and data in the package.

task = tasks.find("cards-4")
item = task.item(number=0, seed=0)
"""

from __future__ import annotations

import functools

from foveakv.errors import InputError
from foveakv.evaluation.items import Task
from foveakv.evaluation.tasks import album, chart, needle, photos, printed, reading, text, turns

OFFLINE = [
    "cards-1", "cards-4", "cards-16", "print", "chart", "photos", "row", "reading", "turns", "story", "text",
]  # fmt: skip
ALBUM = ["album-32", "album-list-32", "album-turns-32"]
SUITES = {
    "offline": OFFLINE,
    "album": ALBUM,
    "validation": [f"{name}@validation" for name in OFFLINE],
    "album-validation": [f"{name}@validation" for name in ALBUM],
}
"""The suites whose names end in `validation` use other handwriting, fonts and photographs. Use them to choose settings,
so that `offline` and `album` stay unseen."""

GROUPS = {"needle": "needles", "list": "lists", "album": "albums"}
"""Kinds of answers, and their names in reports. Needles: one fact about one image; lists: a reply about all images, or
several questions; albums: both, in long prompts that are nearly all images."""

_REGISTERED: dict[str, Task] = {}


def available() -> list[str]:
    """Names of all tasks, built-in ones first."""
    return [*_builtin(), *(name for name in _REGISTERED if name not in _builtin())]


def find(name: str) -> Task:
    """The task of that name. InputError: there is none."""
    found = _REGISTERED.get(name) or _builtin().get(name)
    if found is None:
        raise InputError(f"unknown task {name!r}; available: {', '.join(available())}")
    return found


def suite(name: str) -> list[str]:
    """The names of a suite's tasks. InputError: there is no such suite."""
    if name not in SUITES:
        raise InputError(f"unknown suite {name!r}; available: {', '.join(SUITES)}")
    return list(SUITES[name])


def register(task: Task) -> Task:
    """Adds a task under its name."""
    _REGISTERED[task.name] = task
    return task


@functools.cache
def _builtin() -> dict[str, Task]:
    found: list[Task] = []
    for split, suffix in (("test", ""), ("validation", "@validation")):
        for module in (needle, printed, chart, photos, reading, turns, album, text):
            found += module.build(split, suffix)
    return {task.name: task for task in found}

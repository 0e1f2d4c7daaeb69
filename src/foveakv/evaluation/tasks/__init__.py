"""The tasks by name, and the offline suite, which is generated from a seed and data in the package.

task = tasks.find("cards-4")
item = task.item(number=0, seed=0)
"""

from __future__ import annotations

import functools

from foveakv.errors import InputError
from foveakv.evaluation.items import Task
from foveakv.evaluation.tasks import chart, needle, photos, printed, reading, text, turns

OFFLINE = [
    "cards-1", "cards-4", "cards-16", "print", "chart", "photos", "row", "reading", "turns", "story", "text",
]  # fmt: skip
SUITES = {"offline": OFFLINE, "validation": [f"{name}@validation" for name in OFFLINE]}
"""`validation` uses other handwriting, fonts and photographs. Use it to choose settings, so that `offline` stays
unseen."""

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
        for module in (needle, printed, chart, photos, reading, turns, text):
            found += module.build(split, suffix)
    return {task.name: task for task in found}

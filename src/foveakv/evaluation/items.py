"""What a task is: items with pictures, turns with questions, facts that an answer must contain."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from foveakv.errors import InputError

if TYPE_CHECKING:
    import numpy as np
    from PIL.Image import Image


@dataclass(frozen=True)
class Turn:
    """A question and what its answer must contain.

    text: what the user says; in the first turn with one `<image>` mark per picture. facts: the pieces of the right
    answer; a reply scores the share of them that it gets right. separator: what stands between the pieces of a reply.
    ordered: a fact counts at its own place only (a list), else at any place; of a reply with more pieces than facts the
    first ones count. max_new_tokens: the longest reply.
    """

    text: str
    facts: tuple[str, ...]
    separator: str = "; "
    ordered: bool = False
    max_new_tokens: int = 16

    @property
    def answer(self) -> str:
        """The right reply."""
        return self.separator.join(self.facts)


@dataclass(frozen=True)
class Item:
    """One question, or several about the same pictures. `number` and `seed` make the same item again.

    long: the reply runs to a hundred tokens and more, so it is also scored by the full cache's log-likelihood.
    """

    task: str
    number: int
    seed: int
    images: tuple[Image, ...]
    turns: tuple[Turn, ...]
    long: bool = False


@dataclass(frozen=True)
class Task:
    """A kind of item. `make(rng)` draws pictures and turns; equal seeds give equal items.

    title: a line for reports. long: see `Item`. ranked: methods are ranked by it; a control is only reported.
    """

    name: str
    title: str
    make: Callable[[np.random.Generator], tuple[tuple[Image, ...], tuple[Turn, ...]]]
    long: bool = False
    ranked: bool = True

    def item(self, number: int, seed: int = 0) -> Item:
        """The task's item `number` (from 0)."""
        import numpy as np

        digits = [seed, number, *self.name.encode("utf8")]
        images, turns = self.make(np.random.default_rng(digits))
        return Item(self.name, number, seed, images, turns, self.long)


_TASKS: dict[str, Task] = {}


def register(task: Task) -> Task:
    """Makes a task known by its name."""
    _TASKS[task.name] = task
    return task


def find(name: str) -> Task:
    """The task of that name. InputError: there is none."""
    known = available()
    if name not in known:
        raise InputError(f"no task {name!r}; there are {', '.join(known)}")
    return _TASKS[name]


def available() -> list[str]:
    """Names of all tasks, in the order of reports."""
    from foveakv.evaluation import tasks

    tasks.load()
    return list(_TASKS)


def suite(name: str) -> list[str]:
    """The tasks of a suite. InputError: there is no such suite."""
    from foveakv.evaluation import tasks

    if name not in tasks.SUITES:
        raise InputError(f"no suite {name!r}; there are {', '.join(tasks.SUITES)}")
    return list(tasks.SUITES[name])

"""The figures of a summary: candidates, cells, task states, leaderboards, differences, failures, head maps.

Plain data classes. `foveakv.evaluation.summary` computes them, `foveakv.evaluation.report` shows them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from foveakv.core.budget import Budget, parse_budget
from foveakv.evaluation.bootstrap import Floats, Interval

FLOOR = "random"
"""The method that every other method must beat."""

FULL_AT_LEAST = 0.85
"""Accuracy of the full cache below which a task does not rank: errors may be the model's, not the method's."""

_KINDS = ("ratio", "tokens", "bytes")


@dataclass(frozen=True)
class Candidate:
    """A method at one budget.

    label: its name in the run. series: the name that it shares with the same method at other budgets (without budgets:
    with other numbers of visual tokens). size: the `target_visual_tokens` of a candidate of such a series.
    """

    label: str
    method: str
    series: str
    budget: Budget | None
    size: float = 0.0

    @classmethod
    def of(cls, label: str, method: str, budget: float | int | str | None, size: Any = None) -> Candidate:
        """From a label such as "hae 0.1", whose series is "hae". BudgetError: the budget cannot be read."""
        if budget is None:
            sized = isinstance(size, int | float) and label.endswith(f" {size}")
            return cls(label, method, label.removesuffix(f" {size}"), None, float(size) if sized else 0.0)
        return cls(label, method, label.removesuffix(f" {budget}"), parse_budget(budget))

    @property
    def place(self) -> tuple[int, float]:
        """Sort key by budget: grouped by kind, smallest first, candidates without a budget last."""
        if self.budget is None:
            return len(_KINDS), self.size
        return _KINDS.index(self.budget.kind), float(self.budget.value)


@dataclass(frozen=True)
class Cell:
    """One candidate on one task. Means over items without an error; None where no item has the value.

    n, planned, failed, skipped: number of items that count, that the plan has, that ended with an error, and that the
    method does not apply to. accuracy: share of facts that are right. change: accuracy minus the full cache's on the
    same items. match: as in `Result`. kl: nats per token over all `scored` tokens of all items. log_likelihood: nats
    per token. stored, peak: bytes on the compute device as a share of a full cache's (sum over sum). host: bytes in the
    backing store per item. total: bytes on the device and in the backing store together, as such a share. time: median
    over items of the time per token relative to the full cache's on the same item. retrieved: slots per item; hits:
    share of them that were retrieved in the step before too.
    """

    task: str
    label: str
    n: int
    planned: int
    failed: int
    skipped: int
    accuracy: Interval
    change: Interval
    match: float | None
    kl: float | None
    scored: int
    log_likelihood: float | None
    stored: float | None
    peak: float | None
    host: float | None
    total: float | None
    time: float | None
    retrieved: float | None
    hits: float | None

    @property
    def host_share(self) -> float | None:
        """Bytes in the backing store as a share of a full cache's."""
        return None if self.total is None or self.stored is None else self.total - self.stored

    @property
    def complete(self) -> bool:
        """Whether no planned item is missing or failed."""
        return self.n + self.skipped >= self.planned


@dataclass(frozen=True)
class TaskState:
    """Whether a task can rank methods.

    floor: accuracy of random at the smallest budget minus the full cache's, paired (None: no result). control: the task
    is reported but never ranks. floor_planned: the plan has random, so a result is expected.
    """

    name: str
    title: str
    full: Interval
    floor: Interval | None
    floor_label: str | None
    control: bool = False
    floor_planned: bool = False

    @property
    def weak(self) -> bool:
        """The full cache is below `FULL_AT_LEAST`, or was not run."""
        return not self.full.mean >= FULL_AT_LEAST - 1e-9

    @property
    def blind(self) -> bool:
        """The full cache is not significantly better than random tokens."""
        return self.floor_planned if self.floor is None else not self.floor.high < 0

    @property
    def ranked(self) -> bool:
        """Whether the task ranks methods."""
        return not self.weak and not self.blind and not self.control

    @property
    def reasons(self) -> list[str]:
        """Why the task does not rank, and what else limits it."""
        if math.isnan(self.full.mean):
            return ["the full cache has no result here: not used to rank"]
        found = ["a control: not used to rank"] if self.control else []
        if self.weak:
            found.append(f"full accuracy is under {FULL_AT_LEAST:.0%}: not used to rank")
        if self.floor is None and self.floor_planned:
            if not self.control:
                found.append("random has no result here, so there is no floor to check against: not used to rank")
        elif self.blind:
            found.append("cannot tell the full cache from random: says nothing about methods, not used to rank")
        if self.floor is None and not self.floor_planned and not self.control:
            found.append("random was not run here: there is no floor to check against")
        return found


@dataclass(frozen=True)
class Place:
    """A row of a leaderboard: means over the ranking tasks, each task with equal weight.

    rank: None for the full cache, and for a candidate that lacks a ranking task. score: mean accuracy over all its
    items. change: relative to full on the same items, -0.05 is a loss of 5%. floor: accuracy minus random's at the same
    budget, paired (None: it is random, or random was not run). stored, total, time: means over tasks. groups: mean
    accuracy over the ranking tasks of each group, by its name. missing: ranking tasks without a result. short: tasks
    with fewer items than planned.
    """

    rank: int | None
    candidate: Candidate
    score: float
    change: Interval
    floor: Interval | None
    n: int
    stored: float | None
    total: float | None
    time: float | None
    groups: Mapping[str, Interval]
    missing: tuple[str, ...]
    short: tuple[str, ...]


@dataclass(frozen=True)
class Board:
    """A leaderboard at one budget (None: candidates without a budget), best first; full is the first row, unranked."""

    budget: Budget | None
    rows: tuple[Place, ...]
    has_floor: bool


@dataclass(frozen=True)
class Differences:
    """pairs[i, j]: accuracy of labels[i] minus accuracy of labels[j], paired, for i < j."""

    labels: tuple[str, ...]
    pairs: dict[tuple[int, int], Interval]

    def at(self, i: int, j: int) -> Interval:
        """Row i minus row j, for any i other than j."""
        if i < j:
            return self.pairs[i, j]
        found = self.pairs[j, i]
        return Interval(-found.mean, -found.high, -found.low, found.n)


@dataclass(frozen=True)
class Failure:
    """Results that ended with the same error: (task, item, label) each."""

    error: str
    cases: tuple[tuple[str, int, str], ...]

    @property
    def headline(self) -> str:
        """How many results, of which methods, on which tasks."""
        count = len(self.cases)
        labels, tasks = [label for _, _, label in self.cases], [task for task, _, _ in self.cases]
        return f"{count} {'result' if count == 1 else 'results'}: {_few(labels)} on {_few(tasks)}"


@dataclass(frozen=True)
class StaticHeads:
    """share [layers, heads]: share of items in which the head was static. labels: candidates with this same map."""

    labels: tuple[str, ...]
    share: Floats = field(compare=False)
    items: int = 0


def _few(names: Sequence[str], most: int = 5) -> str:
    once = list(dict.fromkeys(names))
    rest = f" and {len(once) - most} more" if len(once) > most else ""
    return ", ".join(once[:most]) + rest

"""What a run's results say: a cell per task and candidate, which tasks can rank methods, leaderboards, differences.

Rules, so that no figure says more than it can:

- Results with an error count for nothing but the list of failures. That a method does not apply to an item (it drops
  visual tokens only, and there is no picture) is no failure.
- A difference is paired: only items that both sides have.
- A task ranks methods where the full cache gets at least 85% and is told apart from random tokens at the smallest
  budget (the paired interval of random less full lies below 0). All other tasks are shown and not used to rank.
- A candidate that lacks a ranking task has no rank. Ranks follow the loss against the full cache on the same items, so
  that a candidate with fewer items is not ranked by which items it has.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import fmean, median
from typing import Any

import numpy as np

from foveakv.core.budget import Budget, parse_budget
from foveakv.evaluation import stratified as strata
from foveakv.evaluation.bootstrap import Floats, Interval, interval, paired
from foveakv.evaluation.plan import Plan
from foveakv.evaluation.results import FULL, Result, does_not_apply

FLOOR = "random"
"""The method that every other must beat."""

FULL_AT_LEAST = 0.85
"""A task on which the full cache gets less is not used to rank: what it loses may be the model's own confusion."""

_KINDS = ("ratio", "tokens", "bytes")


@dataclass(frozen=True)
class Candidate:
    """A method at one budget. series: what its label and those of its other budgets have in common."""

    label: str
    method: str
    series: str
    budget: Budget | None

    @classmethod
    def of(cls, label: str, method: str, budget: float | int | str | None) -> Candidate:
        if budget is None:
            return cls(label, method, label, None)
        return cls(label, method, label.removesuffix(f" {budget}"), parse_budget(budget))

    @property
    def place(self) -> tuple[int, float]:
        """For sorting by budget: kinds apart, small ones first, candidates without a budget last."""
        if self.budget is None:
            return len(_KINDS), 0.0
        return _KINDS.index(self.budget.kind), float(self.budget.value)


@dataclass(frozen=True)
class Cell:
    """One candidate on one task. Means over items without an error; None: nothing to take a mean of.

    n, planned, failed, skipped: items that count, that the plan has, that ended with an error, to which the method does
    not apply. accuracy: share of facts that are
    right. change: accuracy less the full cache's on the same items. match: as in `Result`. kl: nats per token, over all
    `scored` tokens of all items. log_likelihood: nats per token. stored, peak: bytes on the compute device as a share
    of a full cache's (sum over sum). host: bytes in the backing store per item. time: median over items of the time
    per token over the full cache's on the same item. retrieved: slots per item; hits: share of them that were there
    already.
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
    time: float | None
    retrieved: float | None
    hits: float | None

    @property
    def complete(self) -> bool:
        return self.n + self.skipped >= self.planned


@dataclass(frozen=True)
class TaskState:
    """Whether a task can rank methods. floor: random at the smallest budget less full, paired (None: no result).
    control: it is there to be looked at, not to rank. floor_planned: random should have a result."""

    name: str
    title: str
    full: Interval
    floor: Interval | None
    floor_label: str | None
    control: bool = False
    floor_planned: bool = False

    @property
    def weak(self) -> bool:
        """The full cache gets less than it must, or was not run."""
        return not self.full.mean >= FULL_AT_LEAST - 1e-9

    @property
    def blind(self) -> bool:
        """The full cache cannot be told from random tokens, or random tokens are even better."""
        return self.floor_planned if self.floor is None else not self.floor.high < 0

    @property
    def ranked(self) -> bool:
        return not self.weak and not self.blind and not self.control

    @property
    def reasons(self) -> list[str]:
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
    """A row of a leaderboard: means over the ranking tasks, all of them counting the same.

    rank: None for the full cache, and for a candidate that lacks one of these tasks. score: mean accuracy over all its
    items. change: relative to full on the same items, -0.05 is a loss of 5%. floor: less random at the same budget,
    paired, as a share of facts (None: it is random, or random was not run). stored, host, time: means over tasks.
    missing: ranking tasks without a result. short: tasks with fewer items than planned.
    """

    rank: int | None
    candidate: Candidate
    score: float
    change: Interval
    floor: Interval | None
    n: int
    stored: float | None
    host: float | None
    time: float | None
    missing: tuple[str, ...]
    short: tuple[str, ...]


@dataclass(frozen=True)
class Board:
    """A leaderboard at one budget (None: candidates that have none of their own), best first; full leads unranked."""

    budget: Budget | None
    rows: tuple[Place, ...]
    has_floor: bool


@dataclass(frozen=True)
class Differences:
    """labels[i] less labels[j], paired, for i < j."""

    labels: tuple[str, ...]
    pairs: dict[tuple[int, int], Interval]

    def at(self, i: int, j: int) -> Interval:
        """Of row i less row j, for any i other than j."""
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
        """How many, with what, on what."""
        count = len(self.cases)
        labels, tasks = [label for _, _, label in self.cases], [task for task, _, _ in self.cases]
        return f"{count} {'result' if count == 1 else 'results'}: {_few(labels)} on {_few(tasks)}"


@dataclass(frozen=True)
class StaticHeads:
    """share[layer, head]: of the items in which the head was static. labels: whose map this is, all the same."""

    labels: tuple[str, ...]
    share: Floats = field(compare=False)
    items: int = 0


class Summary:
    """All figures of a run. plan: says what should be there; titles: task name -> a line about it; controls: tasks that
    are only reported."""

    def __init__(
        self,
        plan: Plan,
        results: Sequence[Result],
        titles: dict[str, str] | None = None,
        controls: Collection[str] = (),
    ) -> None:
        self.plan = plan
        # One order, whatever file and place a result stands in: bootstrap draws follow it.
        self.results = sorted(results, key=lambda result: (result.task, result.seed, result.item, result.label))
        self.titles = titles or {}
        self.controls = frozenset(controls)
        seen = {result.label: Candidate.of(result.label, result.method, result.budget) for result in self.results}
        order = [entry.label for entry in plan.entries]
        self.candidates = [
            seen.get(entry.label) or Candidate.of(entry.label, entry.method, entry.settings.get("budget"))
            for entry in plan.entries
        ] + [candidate for label, candidate in seen.items() if label not in order]
        self.candidates = _told_apart(self.candidates, {entry.label: entry.settings for entry in plan.entries})
        self.tasks = list(dict.fromkeys([*plan.tasks, *(result.task for result in self.results)]))
        self._good: dict[tuple[str, str], dict[Hashable, Result]] = {}
        self._failed: Counter[tuple[str, str]] = Counter()
        self._skipped: Counter[tuple[str, str]] = Counter()
        for result in self.results:
            where = result.task, result.label
            if result.error is None and result.score is not None:
                self._good.setdefault(where, {})[result.item, result.seed] = result
            else:
                (self._skipped if does_not_apply(result.error) else self._failed)[where] += 1

    @property
    def full(self) -> Candidate | None:
        """The yardstick, where it is in the run."""
        return next((c for c in self.candidates if c.method == FULL), None)

    @property
    def series(self) -> list[str]:
        """All series, in the plan's order, the full cache first and the floor last."""
        names = dict.fromkeys(c.series for c in self.candidates)
        methods = {c.series: c.method for c in self.candidates}
        return sorted(names, key=lambda name: {FULL: 0, FLOOR: 2}.get(methods[name], 1))

    @property
    def budgets(self) -> list[Budget]:
        """Each budget once, small ones first."""
        found = {c.place: c.budget for c in self.candidates if c.budget is not None}
        return [found[place] for place in sorted(found)]

    def at(self, budget: Budget | None) -> list[Candidate]:
        """The candidates with this budget; for None those that have none, the full cache left out."""
        if budget is None:
            return [c for c in self.candidates if c.budget is None and c.method != FULL]
        return [c for c in self.candidates if c.budget is not None and _same(c.budget, budget)]

    def scores(self, task: str, label: str) -> dict[Hashable, float]:
        """Item -> score, of the items without an error."""
        return {key: float(r.score or 0) for key, r in self._good.get((task, label), {}).items()}

    @cached_property
    def cells(self) -> dict[tuple[str, str], Cell]:
        """(task, label) -> its figures; every task with every candidate, also those without a result."""
        return {(task, c.label): self._cell(task, c.label) for task in self.tasks for c in self.candidates}

    @cached_property
    def states(self) -> dict[str, TaskState]:
        """Task -> whether it ranks."""
        return {task: self._state(task) for task in self.tasks}

    @property
    def ranked(self) -> list[str]:
        """The tasks that rank methods."""
        return [task for task in self.tasks if self.states[task].ranked]

    @cached_property
    def boards(self) -> list[Board]:
        """A leaderboard per budget, and one for candidates without a budget where there are any."""
        if not self.ranked:
            return []
        budgets: list[Budget | None] = list(self.budgets)
        return [self._board(budget) for budget in ([*budgets, None] if self.at(None) else budgets)]

    def differences(self, budget: Budget | None, tasks: Sequence[str]) -> Differences:
        """Between all candidates at a budget that have results on all these tasks, best first."""
        found = [c.label for c in self.at(budget) if all(self.scores(task, c.label) for task in tasks)]
        found.sort(key=lambda label: -fmean(self.cells[task, label].accuracy.mean for task in tasks))
        return Differences(
            tuple(found), strata.differences([[self.scores(task, label) for task in tasks] for label in found])
        )

    @cached_property
    def failures(self) -> list[Failure]:
        """Errors grouped by their text, the most frequent first."""
        groups: dict[str, list[tuple[str, int, str]]] = {}
        for result in self.results:
            if result.error is not None and not does_not_apply(result.error):
                groups.setdefault(result.error, []).append((result.task, result.item, result.label))
        ordered = sorted(groups.items(), key=lambda group: -len(group[1]))
        return [Failure(error, tuple(sorted(cases))) for error, cases in ordered]

    @cached_property
    def static_heads(self) -> list[StaticHeads]:
        """Maps of candidates that say which heads were static, equal maps of one series joined."""
        maps: list[tuple[str, StaticHeads]] = []
        for candidate in sorted(self.candidates, key=lambda c: c.place):
            found = [
                np.asarray(result.details["static_heads"], dtype=np.float64)
                for task in self.tasks
                for result in self._good.get((task, candidate.label), {}).values()
                if result.details and result.details.get("static_heads") is not None
            ]
            if not found or any(one.ndim != 2 or one.shape != found[0].shape for one in found):
                continue
            share = np.mean(found, axis=0)
            for place, (series, other) in enumerate(maps):
                if series == candidate.series and other.items == len(found) and np.array_equal(other.share, share):
                    maps[place] = series, StaticHeads((*other.labels, candidate.label), share, len(found))
                    break
            else:
                maps.append((candidate.series, StaticHeads((candidate.label,), share, len(found))))
        return [found for _, found in maps]

    def _cell(self, task: str, label: str) -> Cell:
        good = list(self._good.get((task, label), {}).values())
        full = self._good.get((task, self.full.label), {}) if self.full else {}
        scores = self.scores(task, label)
        both = [(r, full[r.item, r.seed]) for r in good if (r.item, r.seed) in full]
        times = [
            r.token_seconds / beside
            for r, other in both
            if r.token_seconds is not None and (beside := r.full_token_seconds or other.token_seconds)
        ]
        scored = [r for r in good if r.kl is not None and r.scored]
        tokens = sum(r.scored for r in scored)
        retrieved = [r.retrieved for r in good]
        return Cell(
            task=task,
            label=label,
            n=len(good),
            planned=max(self.plan.items if task in self.plan.tasks else 0, len(good)),
            failed=self._failed[task, label],
            skipped=self._skipped[task, label],
            accuracy=interval(list(scores.values())),
            change=paired(scores, self.scores(task, self.full.label) if self.full else {}),
            match=_mean(r.match for r in good),
            kl=sum((r.kl or 0.0) * r.scored for r in scored) / tokens if tokens else None,
            scored=tokens,
            log_likelihood=_mean(r.log_likelihood for r in good),
            stored=_share(good, lambda r: r.stored_bytes),
            peak=_share(good, lambda r: r.peak_bytes),
            host=_mean(r.host_bytes for r in good),
            time=median(times) if times else None,
            retrieved=fmean(retrieved) if any(retrieved) else None,
            hits=sum(r.hits for r in good) / sum(retrieved) if any(retrieved) else None,
        )

    def _state(self, task: str) -> TaskState:
        full = self.scores(task, self.full.label) if self.full else {}
        floors = sorted((c for c in self.candidates if c.method == FLOOR), key=lambda c: c.place)
        floor = next((c for c in floors if self.scores(task, c.label)), None)
        return TaskState(
            name=task,
            title=self.titles.get(task, ""),
            full=interval(list(full.values())),
            floor=paired(self.scores(task, floor.label), full) if floor else None,
            floor_label=floor.label if floor else None,
            control=task in self.controls,
            floor_planned=bool(floors),
        )

    def _board(self, budget: Budget | None) -> Board:
        floor = next((c for c in self.at(budget) if c.method == FLOOR), None)
        rows = [self._place(candidate, floor) for candidate in self.at(budget)]
        rows.sort(key=_order)
        ranked: list[Place] = []
        for row in rows:
            rank = None
            if not row.missing and not math.isnan(row.change.mean):
                better = sum(not other.missing and other.change.mean > row.change.mean + 1e-12 for other in rows)
                rank = better + 1
            ranked.append(replace(row, rank=rank))
        first = [self._place(self.full, None)] if self.full else []
        return Board(budget, (*first, *ranked), floor is not None)

    def _place(self, candidate: Candidate, floor: Candidate | None) -> Place:
        there = [task for task in self.ranked if self.scores(task, candidate.label)]
        cells = [self.cells[task, candidate.label] for task in there]
        against = [self._pair(task, candidate, self.full) for task in there] if self.full else []
        over = None
        if floor is not None and floor.label != candidate.label:
            over = strata.mean([self._pair(task, candidate, floor) for task in there], strata.difference)
        return Place(
            rank=None,
            candidate=candidate,
            score=fmean(cell.accuracy.mean for cell in cells) if cells else math.nan,
            change=strata.mean(against, strata.relative),
            floor=over,
            n=sum(cell.n for cell in cells),
            stored=_mean(cell.stored for cell in cells),
            host=_mean(cell.host for cell in cells),
            time=_mean(cell.time for cell in cells),
            missing=tuple(task for task in self.ranked if task not in there),
            short=tuple(cell.task for cell in cells if not cell.complete),
        )

    def _pair(self, task: str, one: Candidate, other: Candidate) -> Floats:
        return strata.common([self.scores(task, one.label), self.scores(task, other.label)])


def _told_apart(candidates: Sequence[Candidate], settings: Mapping[str, Mapping[str, Any]]) -> list[Candidate]:
    """A series is one method with one set of settings, once at every budget. Where it is not, labels are the names."""
    groups: dict[str, list[Candidate]] = {}
    for candidate in candidates:
        groups.setdefault(candidate.series, []).append(candidate)
    mixed = set()
    for series, members in groups.items():
        own = [{k: v for k, v in settings.get(c.label, {}).items() if k != "budget"} for c in members]
        one = all((c.method, other) == (members[0].method, own[0]) for c, other in zip(members, own, strict=True))
        if not one or len({c.place for c in members}) < len(members):
            mixed.add(series)
    return [replace(c, series=c.label) if c.series in mixed else c for c in candidates]


def _order(row: Place) -> tuple[bool, bool, float, str]:
    """Best first, for sorting. A NaN (full gets nothing on what the candidate has) would leave the others unsorted."""
    unknown = math.isnan(row.change.mean)
    return bool(row.missing), unknown, 0.0 if unknown else -row.change.mean, row.candidate.label


def _few(names: Sequence[str], most: int = 5) -> str:
    once = list(dict.fromkeys(names))
    rest = f" and {len(once) - most} more" if len(once) > most else ""
    return ", ".join(once[:most]) + rest


def _same(one: Budget, other: Budget) -> bool:
    return one.kind == other.kind and one.value == other.value


def _mean(values: Iterable[float | int | None]) -> float | None:
    found = [float(value) for value in values if value is not None]
    return fmean(found) if found else None


def _share(results: Sequence[Result], size: Callable[[Result], int | None]) -> float | None:
    """Sum of sizes over the sum of a full cache's bytes, of the results that have both."""
    pairs = [(own, r.full_bytes) for r in results if (own := size(r)) is not None and r.full_bytes]
    return sum(own for own, _ in pairs) / sum(full for _, full in pairs) if pairs else None

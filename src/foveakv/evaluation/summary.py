"""The figures of a run: a cell per task and candidate, which tasks rank methods, leaderboards, differences.

- Results with an error count only in the list of failures. A method that does not apply to an item (it drops visual
  tokens only, and the item has no image) is not a failure.
- Differences are paired: they use the items that both sides have.
- A task ranks methods if the full cache gets at least 85% and is significantly better than random tokens at the
  smallest budget (the paired interval of random minus full is below 0). All other tasks are reported without ranking.
- If everything ties, intervals have exact bounds instead of none (`bootstrap.tied`).
- A candidate that lacks a ranking task has no rank. Ranks follow the loss relative to the full cache on the same items,
  so that a rank does not depend on which items a candidate has.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from statistics import fmean, median
from typing import Any

import numpy as np

from foveakv.core.budget import Budget
from foveakv.evaluation import stratified
from foveakv.evaluation.bootstrap import Floats, Interval, interval, paired
from foveakv.evaluation.figures import (
    FLOOR,
    Board,
    Candidate,
    Cell,
    Differences,
    Failure,
    Place,
    StaticHeads,
    TaskState,
)
from foveakv.evaluation.plan import Plan
from foveakv.evaluation.results import FULL, Result, does_not_apply

SIZE = "target_visual_tokens"
"""The setting that is the size of methods without a budget."""


class Summary:
    """All figures of a run.

    Args:
        plan: the run's plan, for what is still missing.
        results: the results, in any order.
        titles: task name -> a one-line description.
        controls: tasks that are reported but never rank.
        groups: task name -> its group, for tasks that have one.
    """

    def __init__(
        self,
        plan: Plan,
        results: Sequence[Result],
        titles: dict[str, str] | None = None,
        controls: Collection[str] = (),
        groups: Mapping[str, str] | None = None,
    ) -> None:
        self.plan = plan
        self._groups = groups or {}
        # Bootstrap draws follow the order of items, so it must not depend on the files.
        self.results = sorted(results, key=lambda result: (result.task, result.seed, result.item, result.label))
        self.titles = titles or {}
        self.controls = frozenset(controls)
        seen = {
            result.label: Candidate.of(result.label, result.method, result.budget, result.settings.get(SIZE))
            for result in self.results
        }
        order = [entry.label for entry in plan.entries]
        self.candidates = [
            seen.get(entry.label)
            or Candidate.of(entry.label, entry.method, entry.settings.get("budget"), entry.settings.get(SIZE))
            for entry in plan.entries
        ] + [candidate for label, candidate in seen.items() if label not in order]
        self.candidates = _split_mixed_series(self.candidates, {entry.label: entry.settings for entry in plan.entries})
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
        """The full cache, the baseline of all comparisons; None if it is not in the run."""
        return next((c for c in self.candidates if c.method == FULL), None)

    @property
    def series(self) -> list[str]:
        """All series in the plan's order, the full cache first and random last."""
        names = dict.fromkeys(c.series for c in self.candidates)
        methods = {c.series: c.method for c in self.candidates}
        return sorted(names, key=lambda name: {FULL: 0, FLOOR: 2}.get(methods[name], 1))

    @property
    def budgets(self) -> list[Budget]:
        """The distinct budgets, smallest first."""
        found = {c.place: c.budget for c in self.candidates if c.budget is not None}
        return [found[place] for place in sorted(found)]

    def at(self, budget: Budget | None) -> list[Candidate]:
        """The candidates with this budget; for None those without a budget, except the full cache."""
        if budget is None:
            return [c for c in self.candidates if c.budget is None and c.method != FULL]
        return [c for c in self.candidates if c.budget is not None and _same(c.budget, budget)]

    def scores(self, task: str, label: str) -> dict[Hashable, float]:
        """(item, seed) -> score, for items without an error."""
        return {key: float(r.score or 0) for key, r in self._good.get((task, label), {}).items()}

    @cached_property
    def cells(self) -> dict[tuple[str, str], Cell]:
        """(task, label) -> its figures, for every task and candidate, including those without results."""
        return {(task, c.label): self._cell(task, c.label) for task in self.tasks for c in self.candidates}

    @cached_property
    def states(self) -> dict[str, TaskState]:
        """Task -> whether and why it ranks."""
        return {task: self._state(task) for task in self.tasks}

    @property
    def ranked(self) -> list[str]:
        """Names of the tasks that rank methods."""
        return [task for task in self.tasks if self.states[task].ranked]

    @property
    def groups(self) -> dict[str, list[str]]:
        """Group -> its ranking tasks; empty if they are all of one group."""
        found: dict[str, list[str]] = {}
        for task in self.ranked:
            if task in self._groups:
                found.setdefault(self._groups[task], []).append(task)
        return found if sum(map(len, found.values())) > max(map(len, found.values()), default=0) else {}

    def accuracy(self, tasks: Sequence[str], label: str) -> Interval:
        """Mean accuracy of a candidate over tasks, each with equal weight."""
        return stratified.mean([stratified.common([self.scores(task, label)]) for task in tasks], stratified.first)

    @cached_property
    def boards(self) -> list[Board]:
        """A leaderboard per budget, and one for candidates without a budget if there are any."""
        if not self.ranked:
            return []
        budgets: list[Budget | None] = list(self.budgets)
        return [self._board(budget) for budget in ([*budgets, None] if self.at(None) else budgets)]

    def differences(self, budget: Budget | None, tasks: Sequence[str]) -> Differences:
        """Pairwise differences of all candidates at a budget that have results on all these tasks, best first."""
        found = [c.label for c in self.at(budget) if all(self.scores(task, c.label) for task in tasks)]
        found.sort(key=lambda label: -fmean(self.cells[task, label].accuracy.mean for task in tasks))
        return Differences(
            tuple(found), stratified.differences([[self.scores(task, label) for task in tasks] for label in found])
        )

    @cached_property
    def failures(self) -> list[Failure]:
        """Errors grouped by message, the most frequent first."""
        groups: dict[str, list[tuple[str, int, str]]] = {}
        for result in self.results:
            if result.error is not None and not does_not_apply(result.error):
                groups.setdefault(result.error, []).append((result.task, result.item, result.label))
        ordered = sorted(groups.items(), key=lambda group: -len(group[1]))
        return [Failure(error, tuple(sorted(cases))) for error, cases in ordered]

    @cached_property
    def static_heads(self) -> list[StaticHeads]:
        """Maps of candidates whose results say which heads were static; equal maps of one series are merged."""
        maps: list[tuple[str, StaticHeads]] = []
        for candidate in sorted(self.candidates, key=lambda c: c.place):
            found = [
                np.asarray(result.static_heads, dtype=np.float64)
                for task in self.tasks
                for result in self._good.get((task, candidate.label), {}).values()
                if result.static_heads is not None
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
            accuracy=interval(list(scores.values()), shares=True),
            change=paired(scores, self.scores(task, self.full.label) if self.full else {}, shares=True),
            match=_mean(r.match for r in good),
            kl=sum((r.kl or 0.0) * r.scored for r in scored) / tokens if tokens else None,
            scored=tokens,
            log_likelihood=_mean(r.log_likelihood for r in good),
            stored=_share(good, lambda r: r.stored_bytes),
            peak=_share(good, lambda r: r.peak_bytes),
            host=_mean(r.host_bytes for r in good),
            total=_share(good, lambda r: None if r.stored_bytes is None else r.stored_bytes + (r.host_bytes or 0)),
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
            full=interval(list(full.values()), shares=True),
            floor=paired(self.scores(task, floor.label), full, shares=True) if floor else None,
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
            over = stratified.mean([self._pair(task, candidate, floor) for task in there], stratified.difference)
        return Place(
            rank=None,
            candidate=candidate,
            score=fmean(cell.accuracy.mean for cell in cells) if cells else math.nan,
            change=stratified.mean(against, stratified.relative),
            floor=over,
            n=sum(cell.n for cell in cells),
            stored=_mean(cell.stored for cell in cells),
            total=_mean(cell.total for cell in cells),
            time=_mean(cell.time for cell in cells),
            groups={
                group: self.accuracy(tasks, candidate.label)
                for group, tasks in self.groups.items()
                if all(task in there for task in tasks)
            },
            missing=tuple(task for task in self.ranked if task not in there),
            short=tuple(cell.task for cell in cells if not cell.complete),
        )

    def _pair(self, task: str, one: Candidate, other: Candidate) -> Floats:
        return stratified.common([self.scores(task, one.label), self.scores(task, other.label)])


def _split_mixed_series(candidates: Sequence[Candidate], settings: Mapping[str, Mapping[str, Any]]) -> list[Candidate]:
    """A series is one method with one set of settings, once per budget (or per number of visual tokens). Otherwise each
    candidate is its own series."""
    groups: dict[str, list[Candidate]] = {}
    for candidate in candidates:
        groups.setdefault(candidate.series, []).append(candidate)
    mixed = set()
    for series, members in groups.items():
        own = [
            {k: v for k, v in settings.get(c.label, {}).items() if k != (SIZE if c.size else "budget")} for c in members
        ]
        one = all((c.method, other) == (members[0].method, own[0]) for c, other in zip(members, own, strict=True))
        if not one or len({c.place for c in members}) < len(members):
            mixed.add(series)
    return [replace(c, series=c.label) if c.series in mixed else c for c in candidates]


def _order(row: Place) -> tuple[bool, bool, float, str]:
    """Sort key, best first. NaN (full scores 0 on the candidate's items) would break the sort."""
    unknown = math.isnan(row.change.mean)
    return bool(row.missing), unknown, 0.0 if unknown else -row.change.mean, row.candidate.label


def _same(one: Budget, other: Budget) -> bool:
    return one.kind == other.kind and one.value == other.value


def _mean(values: Iterable[float | int | None]) -> float | None:
    found = [float(value) for value in values if value is not None]
    return fmean(found) if found else None


def _share(results: Sequence[Result], size: Callable[[Result], int | None]) -> float | None:
    """Sum of sizes over the sum of full_bytes, over results that have both."""
    pairs = [(own, r.full_bytes) for r in results if (own := size(r)) is not None and r.full_bytes]
    return sum(own for own, _ in pairs) / sum(full for _, full in pairs) if pairs else None

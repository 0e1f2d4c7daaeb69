"""Compare the default of every method with its paper's preset and the best of equally many settings.

The settings come from `grids.py`. They are chosen on some items and, with tasks, measured again on as many new ones, so
that the best of many is not better by chance alone.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from foveakv.errors import InputError, MethodError
from foveakv.evaluation import stratified
from foveakv.evaluation.bootstrap import Interval
from foveakv.evaluation.compare import Candidate
from foveakv.evaluation.grids import settings
from foveakv.evaluation.plan import Plan
from foveakv.evaluation.results import Result, does_not_apply
from foveakv.methods import find, get
from foveakv.util.values import field_types

if TYPE_CHECKING:
    from foveakv.evaluation.items import Item
    from foveakv.evaluation.runner import Status
    from foveakv.evaluation.trial import Bench

Budget = float | int | str
CLOSE = 0.03
"""Largest loss of the default against the best setting that counts as level with it."""
PAPER = "paper"
"""The preset with a paper's constants."""


@dataclass(frozen=True)
class Found:
    """A method at a budget.

    tried: number of settings. options: the best one's, without the budget. default, paper, best: accuracy (prompts:
    share of the full cache's tokens that are reproduced); paper: None without such a preset, or if it failed. gap:
    default minus best, paired. errors: of settings that failed, which cannot be chosen.
    """

    method: str
    budget: Budget
    tried: int
    options: dict[str, Any]
    default: Interval
    paper: Interval | None
    best: Interval
    gap: Interval
    errors: tuple[str, ...] = ()

    @property
    def close(self) -> bool:
        """Whether the default is within `CLOSE` of the best."""
        return self.gap.mean >= -CLOSE - 1e-9


class Search:
    """The candidates of a search.

    Args:
        methods: names of methods that take a budget.
        budgets: at which every setting runs.
        trials: settings per method, the default included.
        options: settings that all candidates of a method have.
        seed: of the draws.

    Raises:
        MethodError: a method takes no budget, or an option is invalid. InputError: there is nothing to search.
    """

    def __init__(
        self,
        methods: Sequence[str],
        budgets: Sequence[Budget],
        trials: int,
        options: Mapping[str, Mapping[str, Any]] | None = None,
        seed: int = 0,
    ) -> None:
        if not methods or not budgets or trials < 2:
            raise InputError("a search needs at least one method, one budget and two settings per method")
        for name in options or {}:
            if name not in methods:
                raise MethodError(f"there are settings for {name!r}, which is not one of the methods")
        self.methods, self.budgets, self.trials = list(methods), list(budgets), trials
        self.settings: dict[str, list[dict[str, Any]]] = {}
        self.papers: dict[str, dict[str, Any]] = {}
        for name in methods:
            own = dict((options or {}).get(name, {}))
            if "budget" not in field_types(find(name)) or "budget" in own:
                raise MethodError(f"{name} takes no budget, or its settings fix one, so there is nothing to search")
            self.settings[name] = settings(name, trials, seed, own)
            paper = {**own, "preset": PAPER}
            try:
                get(name, **paper, budget=budgets[0])
            except MethodError:
                continue
            self.papers[name] = paper

    @property
    def fewer(self) -> dict[str, int]:
        """Method -> number of its settings, for those that have fewer than `trials`."""
        return {name: len(found) for name, found in self.settings.items() if len(found) < self.trials}

    def candidates(self) -> list[Candidate]:
        """Every setting at every budget, and the papers' presets."""
        found = []
        for name in self.methods:
            for budget in self.budgets:
                for place, options in enumerate(self.settings[name]):
                    found.append(Candidate(_label(name, place, budget), get(name, **options, budget=budget)))
                if name in self.papers:
                    method = get(name, **self.papers[name], budget=budget)
                    found.append(Candidate(_label(name, PAPER, budget), method))
        return found

    def finalists(self, chosen: Mapping[tuple[str, Budget], int]) -> list[Candidate]:
        """The default, the paper's preset and the best setting of every method and budget."""
        keep = {_label(name, place, budget) for (name, budget), best in chosen.items() for place in (0, PAPER, best)}
        return [candidate for candidate in self.candidates() if candidate.label in keep]

    def choose(self, results: Sequence[Result]) -> dict[tuple[str, Budget], int]:
        """(method, budget) -> index of its best setting: by the mean score over tasks, equal ones by KL; by KL alone
        if items have no known answers. Without a setting that ran without errors the default is chosen."""
        table = _Table(results)
        return {
            (name, budget): min(
                range(len(self.settings[name])), key=lambda place: (*table.rank(_label(name, place, budget)), place)
            )
            for name in self.methods
            for budget in self.budgets
        }

    def figures(self, chosen: Mapping[tuple[str, Budget], int], results: Sequence[Result]) -> list[Found]:
        """The outcome for every method and budget, from results of the finalists."""
        table, found = _Table(results), []
        for (name, budget), place in chosen.items():
            default, paper, best = (_label(name, which, budget) for which in (0, PAPER, place))
            labels = [_label(name, which, budget) for which in (*range(len(self.settings[name])), PAPER)]
            found.append(
                Found(
                    name, budget, len(self.settings[name]), self.settings[name][place], table.mean(default),
                    table.mean(paper) if table.complete(paper) else None, table.mean(best), table.gap(default, best),
                    tuple(error for label in labels for error in table.errors.get(label, ())),
                )
            )  # fmt: skip
        return found


def search_tasks(
    search: Search,
    tasks: Sequence[str],
    items: int,
    folder: Path,
    *,
    seed: int = 0,
    workers: int = 1,
    progress: Callable[[Status], None] | None = None,
    **plan: Any,
) -> list[Found]:
    """Searches on tasks with known answers: settings on items of `seed`, finalists on items of `seed` + 1.

    The runs are in `settings` and `finalists` of the folder, so a stopped search resumes. plan: other fields of `Plan`.

    Raises:
        As for `foveakv.evaluation.runner.run`.
    """
    from foveakv.evaluation.runner import run
    from foveakv.evaluation.store import read_results

    def measure(candidates: Sequence[Candidate], part: str, own_seed: int) -> list[Result]:
        own = Plan.of(tasks, candidates, items, seed=own_seed, time_every=0, **plan)
        run(own, folder / part, workers=workers, progress=progress)
        return read_results(folder / part)

    chosen = search.choose(measure(search.candidates(), "settings", seed))
    return search.figures(chosen, measure(search.finalists(chosen), "finalists", seed + 1))


def search_prompts(
    search: Search, bench: Bench, prompts: Sequence[Item], progress: Callable[[int, int], None] | None = None
) -> list[Found]:
    """Searches on prompts without answers, by agreement with the full cache; all figures are of the same prompts."""
    results: list[Result] = []
    for number, item in enumerate(prompts):
        if progress is not None:
            progress(number, len(prompts))
        for result in bench.run(item, search.candidates()):
            results.append(replace(result, item=number, score=result.equal))
    return search.figures(search.choose(results), results)


class _Table:
    """Scores and KL of results by label and task."""

    def __init__(self, results: Sequence[Result]) -> None:
        self.scores: dict[str, dict[str, dict[Hashable, float]]] = {}
        self.kls: dict[str, list[float]] = {}
        self.errors: dict[str, list[str]] = {}
        self.blind = all(not turn.facts for result in results for turn in result.turns)
        self.tasks = list(dict.fromkeys(result.task for result in results))
        for result in results:
            if result.error is None and result.score is not None:
                own = self.scores.setdefault(result.label, {}).setdefault(result.task, {})
                own[result.item, result.seed] = result.score
                self.kls.setdefault(result.label, []).append(result.kl or 0.0)
            elif result.error is not None and not does_not_apply(result.error):
                self.errors.setdefault(result.label, []).append(f"{result.label}: {result.error}")

    def complete(self, label: str) -> bool:
        return label in self.scores and label not in self.errors

    def rank(self, label: str) -> tuple[float, float, float]:
        """Sort key, best first: failures last, then the score (unless unknown), then KL."""
        if not self.complete(label):
            return 1.0, 0.0, 0.0
        score = 0.0 if self.blind else self._score(label)
        return 0.0, -score, fmean(self.kls[label])

    def _score(self, label: str) -> float:
        return fmean(fmean(own.values()) for own in self.scores[label].values())

    def mean(self, label: str) -> Interval:
        own = self.scores.get(label, {})
        return stratified.mean([stratified.common([own.get(task, {})]) for task in self.tasks], stratified.first)

    def gap(self, one: str, other: str) -> Interval:
        """One's mean score less the other's."""
        if one == other:
            return Interval(0.0, 0.0, 0.0, self.mean(one).n)
        mine, theirs = self.scores.get(one, {}), self.scores.get(other, {})
        pairs = [stratified.common([mine.get(task, {}), theirs.get(task, {})]) for task in self.tasks]
        return stratified.mean(pairs, stratified.difference)


def _label(name: str, which: int | str, budget: Budget) -> str:
    return f"{name}#{which} {budget}"

"""Runs of a few made-up results, for figures that are computed by hand."""

from __future__ import annotations

from typing import Any

from foveakv.evaluation.plan import Entry, Plan
from foveakv.evaluation.results import Result
from foveakv.evaluation.summary import Summary


def result(label: str, item: int, score: float | None, task: str = "t", **values: Any) -> Result:
    method, _, budget = label.partition(" ")
    settings = {"budget": float(budget)} if budget else {}
    return Result(task, item, 0, method, settings.get("budget"), label, settings, score=score, **values)


def run(*results: Result, items: int = 4, labels: tuple[str, ...] = ("full", "a 0.1", "random 0.1")) -> Summary:
    tasks = tuple(dict.fromkeys(one.task for one in results))
    entries = tuple(
        Entry(label, label.split(" ")[0], {"budget": float(label.split(" ")[1])} if " " in label else {})
        for label in labels
    )
    return Summary(Plan(tasks, entries, items), results)


def scores(label: str, *values: float, task: str = "t", first: int = 0) -> list[Result]:
    return [result(label, first + number, value, task) for number, value in enumerate(values)]

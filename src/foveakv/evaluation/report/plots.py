"""The plots of a report: accuracy against budgets, bytes and time.

One plot per panel, so that a page can lay them out in as many columns as fit. A series has the same colour, dash and
marker in all of them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

from foveakv.evaluation.bootstrap import Interval
from foveakv.evaluation.figures import Candidate
from foveakv.evaluation.report.panels import Curve, Point, curves
from foveakv.evaluation.report.svg import Look, Plot
from foveakv.evaluation.report.tables import budget_text
from foveakv.evaluation.summary import Summary


def accuracy_plots(summary: Summary, styles: Mapping[str, Look]) -> list[Plot]:
    """Accuracy against the budget: the mean over ranking tasks, then each task; one set per kind of budget."""
    found = []
    for kind in dict.fromkeys(budget.kind for budget in summary.budgets):
        own = [budget for budget in summary.budgets if budget.kind == kind]
        ticks = [(float(budget.value), budget_text(budget).removesuffix(" tokens")) for budget in own]
        label = {
            "ratio": "budget, share of the prompt (log scale)",
            "tokens": "budget, tokens per head (log scale)",
            "bytes": "budget, bytes (log scale)",
        }[kind]
        panels: list[tuple[str, str, list[str]]] = []
        if len(summary.ranked) > 1:
            panels.append(("mean", f"Mean of {len(summary.ranked)} ranking tasks", summary.ranked))
        for group, members in summary.groups.items():
            panels.append((f"group-{group}", f"{group.capitalize()}: {', '.join(members)}", members))
        slugs = _slugs(summary.tasks)
        for task in summary.tasks:
            mark = "" if summary.states[task].ranked else " (not used to rank)"
            panels.append((slugs[task], f"{task}{mark}", [task]))
        for part, title, tasks in panels:
            lines = [_curve(series, members, kind) for series, members in _members(summary, tasks).items()]
            name = f"accuracy-{part}" if kind == "ratio" else f"accuracy-{kind}-{part}"
            lines = [line for line in lines if line.points]
            if lines:
                found.append(curves(name, title, label, lines, styles, ticks))
    return found


def _curve(series: str, members: Sequence[tuple[Candidate, Interval]], kind: str) -> Curve:
    """A curve through the members with a budget of this kind, or a level line if no member has one."""
    points = tuple(Point(float(c.budget.value), y) for c, y in members if c.budget and c.budget.kind == kind)
    level = tuple(Point(math.nan, y) for c, y in members if c.budget is None and not c.size)[:1]
    return Curve(series, points or level, level=not points)


def cost_plots(summary: Summary, styles: Mapping[str, Look]) -> list[Plot]:
    """Accuracy against stored bytes, total bytes, and time per token; means over ranking tasks.

    If no task ranks, means over the tasks on which every candidate has a result; without such a task there is no plot.
    """
    every = [task for task in summary.tasks if all(summary.cells[task, c.label].n for c in summary.candidates)]
    tasks = summary.ranked or every
    if not tasks:
        return []
    over = tasks[0]
    if len(tasks) > 1:
        over = f"mean of {len(tasks)} {'ranking tasks' if summary.ranked else 'tasks'}"
    bytes_ticks = [(x, f"{100 * x:g}%") for x in (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)]
    time_ticks = [
        (x, f"{x:g}") for x in (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0, 20.0, 50.0)
    ]
    found = []
    for name, title, label, field, ticks in (
        ("bytes", f"Bytes, {over}", "stored bytes, share of a full cache's (log scale)", "stored", bytes_ticks),
        ("total", f"Total bytes, {over}", "bytes on device and host, share of full (log scale)", "total", bytes_ticks),
        ("time", f"Time, {over}", "time per token, full cache = 1 (log scale)", "time", time_ticks),
    ):
        lines = []
        for series, members in _members(summary, tasks).items():
            points = []
            for candidate, y in members:
                costs = [getattr(summary.cells[task, candidate.label], field) for task in tasks]
                if all(cost is not None and cost > 0 for cost in costs):
                    points.append(Point(sum(costs) / len(costs), y))
            if points:
                lines.append(Curve(series, tuple(points)))
        if lines:
            found.append(curves(f"accuracy-{name}", title, label, lines, styles, ticks))
    return found


def _members(summary: Summary, tasks: Sequence[str]) -> dict[str, list[tuple[Candidate, Interval]]]:
    """Series -> its candidates that have all tasks, with their mean accuracy, smallest budget first."""
    found: dict[str, list[tuple[Candidate, Interval]]] = {}
    for series in summary.series:
        own = sorted((c for c in summary.candidates if c.series == series), key=lambda c: c.place)
        for candidate in own:
            if all(summary.scores(task, candidate.label) for task in tasks):
                found.setdefault(series, []).append((candidate, summary.accuracy(tasks, candidate.label)))
    return found


def _slugs(tasks: Sequence[str]) -> dict[str, str]:
    """Task -> part of a file name, of letters, digits and dashes; unique, and different from the other plots' names."""
    found: dict[str, str] = {}
    for task in tasks:
        slug = stem = re.sub(r"[^A-Za-z0-9]+", "-", task).strip("-").lower() or "task"
        number = 2
        while slug in found.values() or slug in ("mean", "bytes", "total", "time") or slug.startswith("group-"):
            slug, number = f"{stem}-{number}", number + 1
        found[task] = slug
    return found

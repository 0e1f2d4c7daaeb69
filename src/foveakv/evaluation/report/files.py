"""Reads the report of a run from its folder, and writes it as a page, Markdown, JSON and plots."""

from __future__ import annotations

import json
from pathlib import Path

from foveakv.errors import InputError, StoreError
from foveakv.evaluation import store, tasks
from foveakv.evaluation.items import Task
from foveakv.evaluation.report import markdown, page, tables
from foveakv.evaluation.report.content import Report
from foveakv.evaluation.summary import Summary

PAGE, MARKDOWN, FIGURES, PLOTS = "report.html", "report.md", "leaderboard.json", "plots"


def read(folder: Path) -> Report:
    """The report of a run's folder.

    Raises:
        InputError: the folder is not a run's or has no result yet, or one of its files is damaged; the message names
            the file and the line.
    """
    folder = Path(folder)
    plan, results = store.read_plan(folder), store.read_results(folder)
    if not results:
        raise InputError(f"{folder} has no results yet; run the evaluation first: foveakv eval run")
    known = _known(plan.tasks)
    titles = {task.name: task.title for task in known}
    controls = [task.name for task in known if not task.ranked]
    groups = {task.name: tasks.GROUPS.get(task.group, task.group) for task in known if task.group}
    summary = Summary(plan, results, titles, controls, groups)
    return Report(folder.resolve().name, summary, store.read_starts(folder))


def write(report: Report, folder: Path) -> list[Path]:
    """Writes the page, the Markdown, the figures and the plots; returns their paths, the page first.

    Raises:
        StoreError: a file cannot be written.
        MissingDependencyError: matplotlib is not installed.
    """
    folder = Path(folder)
    files = {
        PAGE: page.render(report),
        MARKDOWN: markdown.render(report),
        FIGURES: json.dumps(tables.leaderboard_json(report.summary), indent=2, ensure_ascii=False) + "\n",
        **{f"{PLOTS}/{plot.name}.svg": plot.file() for plot in report.plots},
    }
    try:
        (folder / PLOTS).mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            store.write_whole(folder / name, text)
        for path in (folder / PLOTS).glob("*.svg"):  # of an earlier report, with more tasks or methods
            if f"{PLOTS}/{path.name}" not in files and path.name.startswith(("accuracy-", "static-")):
                path.unlink()
    except OSError as error:
        raise StoreError(f"cannot write the report to {folder}: {error}") from error
    return [folder / name for name in files]


def _known(names: tuple[str, ...]) -> list[Task]:
    """The tasks that this version has."""
    known = set(tasks.available())
    return [tasks.find(name) for name in names if name in known]

"""What a report shows: facts, warnings, and sections with sentences, tables and plots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from foveakv.evaluation.report import head_maps, headline, plots, tables
from foveakv.evaluation.report.svg import Plot, looks
from foveakv.evaluation.report.tables import Table
from foveakv.evaluation.summary import Summary


@dataclass(frozen=True)
class Section:
    """A section of the report.

    lead: sentences. tables: (group, table); the tables of a named group are folded on the page. legend: the page shows
    the list of series above the plots.
    """

    anchor: str
    title: str
    lead: tuple[str, ...] = ()
    tables: tuple[tuple[str, Table], ...] = ()
    plots: tuple[Plot, ...] = ()
    legend: bool = False

    @property
    def empty(self) -> bool:
        """Whether the section describes figures that the run does not have."""
        return self.anchor in ("budget", "cost", "equal", "differences") and not self.tables and not self.plots


class Report:
    """Everything that a report shows.

    Args:
        name: of the run.
        summary: its figures.
        starts: from run.json, one entry per time that the run was started or resumed.
    """

    def __init__(self, name: str, summary: Summary, starts: Sequence[dict[str, Any]] = ()) -> None:
        self.name, self.summary = name, summary
        self.facts = headline.facts(summary, starts)
        self.warnings = headline.warnings(summary, starts)
        self.looks = looks(summary.series, {c.series: c.method for c in summary.candidates})

    @property
    def title(self) -> str:
        """The heading of the report."""
        return f"Evaluation {self.name}"

    @cached_property
    def plots(self) -> list[Plot]:
        """All plots. MissingDependencyError: matplotlib is not installed."""
        return [plot for section in self.sections for plot in section.plots]

    @cached_property
    def sections(self) -> list[Section]:
        """The sections in order, without empty ones. MissingDependencyError: matplotlib is not installed."""
        summary = self.summary
        found = [
            Section("tasks", "Tasks", tables=(("", tables.task_states(summary)),)),
            self._leaderboards(),
            Section(
                "budget", "Accuracy against budget",
                ("Bars are 95% intervals; the bars of methods at the same budget are drawn side by side. Each panel "
                 "has its own accuracy scale.",),
                plots=tuple(plots.accuracy_plots(summary, self.looks)), legend=True,
            ),
            Section(
                "cost", "Accuracy against bytes and time",
                ("Each line connects the budgets of one method. Up and left is better.",),
                plots=tuple(plots.cost_plots(summary, self.looks)), legend=True,
            ),
            self._equal_bytes(),
            self._differences(),
            self._per_task(),
            *self._static_heads(),
            *self._chunks(),
            Section("rules", "How to read the figures", tuple(headline.rules())),
        ]  # fmt: skip
        return [section for section in found if not section.empty]

    def _leaderboards(self) -> Section:
        ranked = self.summary.ranked
        what = f"{len(ranked)} ranking {'task' if len(ranked) == 1 else 'tasks'}"
        lead = [
            f"Means over {what}: {', '.join(ranked)}."
            if ranked
            else "No task can rank methods; see Tasks for the reasons."
        ]
        groups = self.summary.groups
        if groups:
            parts = "; ".join(f"{group}: {', '.join(tasks)}" for group, tasks in groups.items())
            lead.append(f"A method can be good at one kind of task and bad at another. Means of each kind: {parts}.")
        boards = tuple(("", tables.leaderboard(board, self.summary)) for board in self.summary.boards)
        return Section("leaderboard", "Leaderboard", tuple(lead), boards)

    def _equal_bytes(self) -> Section:
        found = (tables.at_equal_bytes(self.summary, "total"), tables.at_equal_bytes(self.summary, "stored"))
        return Section(
            "equal", "Accuracy at equal bytes",
            ("Mean accuracy over the ranking tasks in %, interpolated between the neighbouring budgets of a method and "
             "never extrapolated. The best at each number of bytes is marked. A method that keeps the whole cache in "
             "the host's memory has few bytes on the device and more than a full cache in total.",),
            tuple(("", table) for table in found if table is not None),
        )  # fmt: skip

    def _differences(self) -> Section:
        summary = self.summary
        names = {c.label: c.series for c in summary.candidates}
        found: list[tuple[str, Table]] = []
        for budget in summary.budgets:
            if len(summary.ranked) > 1:
                title = f"{tables.budget_text(budget)}, mean of {len(summary.ranked)} ranking tasks"
                found.append(("", tables.matrix(summary.differences(budget, summary.ranked), title, names)))
        for task in summary.tasks:
            for budget in summary.budgets:
                own = summary.differences(budget, [task])
                if own.pairs:
                    title = f"{task}, {tables.budget_text(budget)}"
                    found.append((task + self._mark(task), tables.matrix(own, title, names)))
        return Section(
            "differences", "Differences between methods at the same budget",
            ("Row minus column, in points of accuracy, on the items that both have. Sorted by accuracy. A cell with "
             "an arrow and a colour has an interval that excludes 0. Wide tables scroll sideways.",),
            tuple(found),
        )  # fmt: skip

    def _per_task(self) -> Section:
        summary = self.summary
        budgets = [*summary.budgets, *([None] if summary.at(None) else [])]
        found = [
            (task + self._mark(task), tables.task_table(summary, task, budget))
            for task in summary.tasks
            for budget in budgets
        ]
        return Section("figures", "All figures per task and budget", tables=tuple(found))

    def _mark(self, task: str) -> str:
        return "" if self.summary.states[task].ranked else " (not used to rank)"

    def _static_heads(self) -> list[Section]:
        maps = self.summary.static_heads
        if not maps:
            return []
        text = "Share of items in which a head was static (its cache pruned) rather than dynamic (its cache searched)."
        found = (*head_maps.static_plots(maps), head_maps.scale_plot())
        return [Section("static", "Static heads", (text,), plots=found)]

    def _chunks(self) -> list[Section]:
        chunks = tables.chunks(self.summary)
        return [Section("chunks", "Chunks retrieved", tables=(("", chunks),))] if chunks else []

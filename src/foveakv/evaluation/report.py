"""A run's report: one self-contained page, the same in Markdown, figures as JSON, plots as SVG files."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from html import escape
from importlib import resources
from itertools import groupby
from pathlib import Path
from string import Template

from foveakv.errors import InputError, StoreError
from foveakv.evaluation import headline, items, plots, store, tables
from foveakv.evaluation.items import Task
from foveakv.evaluation.plots import Picture
from foveakv.evaluation.summary import Summary
from foveakv.evaluation.tables import Table, Text

PAGE, MARKDOWN, FIGURES, PLOTS = "report.html", "report.md", "leaderboard.json", "plots"


@dataclass(frozen=True)
class Section:
    """A part of the report. lead: sentences. tables: (group, table); the tables of a group are folded on the page."""

    anchor: str
    title: str
    lead: tuple[str, ...] = ()
    tables: tuple[tuple[str, Table], ...] = ()
    pictures: tuple[Picture, ...] = ()
    legend: bool = False

    @property
    def empty(self) -> bool:
        """The lead speaks of figures that are not there."""
        return self.anchor in ("budget", "cost", "differences") and not self.tables and not self.pictures


class Report:
    """Everything that a report shows. starts: from run.json."""

    def __init__(self, name: str, summary: Summary, starts: list[dict[str, object]] | None = None) -> None:
        self.name, self.summary = name, summary
        self.facts = headline.facts(summary, starts or [])
        self.warnings = headline.warnings(summary, starts)
        methods = {c.series: c.method for c in summary.candidates}
        self.looks = plots.looks(summary.series, methods)

    @property
    def title(self) -> str:
        return f"Evaluation {self.name}"

    @cached_property
    def pictures(self) -> list[Picture]:
        """Every plot. MissingDependencyError: matplotlib is not installed."""
        return [picture for section in self.sections for picture in section.pictures]

    @cached_property
    def sections(self) -> list[Section]:
        """In the order of the page; without those that have nothing to show."""
        summary = self.summary
        found = [
            Section("tasks", "Tasks", tables=(("", tables.task_states(summary)),)),
            self._leaderboards(),
            Section(
                "budget", "Accuracy against budget",
                ("Bars are 95% intervals; those of methods at the same budget stand side by side. The scale of "
                 "accuracy is each panel's own.",),
                pictures=tuple(plots.accuracy_pictures(summary, self.looks)), legend=True,
            ),
            Section(
                "cost", "Accuracy against bytes and time",
                ("A line runs through a method's budgets. Up and left is better.",),
                pictures=tuple(plots.cost_pictures(summary, self.looks)), legend=True,
            ),
            self._differences(),
            self._per_task(),
            *self._store(),
            Section("rules", "How to read the figures", tuple(headline.rules())),
        ]  # fmt: skip
        return [section for section in found if not section.empty]

    def html(self) -> str:
        """The page."""
        return _Page(self).text()

    def markdown(self) -> str:
        """The same in Markdown, with plots as files beside it."""
        from foveakv.evaluation.markdown import write

        return write(self)

    def _leaderboards(self) -> Section:
        ranked = self.summary.ranked
        lead = (
            (f"Means over {len(ranked)} ranking {'task' if len(ranked) == 1 else 'tasks'}: {', '.join(ranked)}.",)
            if ranked
            else ("No task can rank methods; see Tasks for the reasons.",)
        )
        boards = tuple(("", tables.leaderboard(board, self.summary)) for board in self.summary.boards)
        return Section("leaderboard", "Leaderboard", lead, boards)

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
            ("Row less column, in points of accuracy, on the items that both have. Sorted by accuracy. A cell with "
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

    def _store(self) -> list[Section]:
        found = []
        maps = self.summary.static_heads
        if maps:
            pictures = (*plots.static_pictures(maps), plots.scale_picture())
            text = "How often a head was static (its cache pruned), not dynamic (its cache searched), over all items."
            found.append(Section("static", "Static heads", (text,), pictures=pictures))
        chunks = tables.chunks(self.summary)
        if chunks:
            found.append(Section("chunks", "Chunks fetched", tables=(("", chunks),)))
        return found


class _Page:
    """The report as HTML. All text is escaped: labels, replies and errors may hold anything."""

    def __init__(self, report: Report) -> None:
        self.report = report
        self.swatches = {
            name: f'<svg class="swatch" viewBox="0 0 26 10" aria-hidden="true"><use href="#look{look.number}"/></svg>'
            for name, look in report.looks.items()
        }

    def text(self) -> str:
        report = self.report
        sections = report.sections
        named = [(s.anchor, s.title) for s in sections]
        named.insert(-1, ("failures", "Failures"))
        links = "".join(f'<a href="#{anchor}">{escape(title)}</a>' for anchor, title in named)
        facts = "".join(f"<dt>{escape(name)}</dt><dd>{_fact(name, value)}</dd>" for name, value in report.facts)
        warnings = "".join(f"<li>{escape(line)}</li>" for line in report.warnings)
        symbols = "".join(f'<g id="look{x.number}">{plots.swatch(x)}</g>' for x in report.looks.values())
        body = [
            f'<svg class="store" aria-hidden="true"><defs>{symbols}</defs></svg>',
            f'<header><h1>{escape(report.title)}</h1><p class="lead">{escape(headline.MEANING)}</p></header>',
            f'<nav aria-label="Sections">{links}</nav>',
            f'<div class="warning" id="warnings"><ul>{warnings}</ul></div>' if warnings else "",
            f'<dl id="run">{facts}</dl>',
            *map(self._section, sections[:-1]),
            self._failures(),
            self._section(sections[-1]),
        ]
        template = resources.files("foveakv.evaluation").joinpath("templates/report.html").read_text(encoding="utf8")
        return Template(template).substitute(title=escape(report.title), body="\n".join(body))

    def _section(self, section: Section) -> str:
        lead = "".join(f"<p>{escape(line)}</p>" for line in section.lead)
        parts = [f'<section id="{section.anchor}"><h2>{escape(section.title)}</h2>{lead}']
        if section.legend:
            parts.append(self._legend())
        if section.pictures:
            figures = "".join(f'<figure id="plot-{p.name}">{p.inline()}</figure>' for p in section.pictures)
            parts.append(f'<div class="panels">{figures}</div>')
        if len(section.tables) == 1:
            parts.append(self._table(section.tables[0][1]))
        else:
            for number, (group, members) in enumerate(groupby(section.tables, key=lambda pair: pair[0])):
                inner = "".join(f"<h3>{escape(table.title)}</h3>{self._table(table)}" for _, table in members)
                fold = f"<details{' open' if not number else ''}><summary>{escape(group)}</summary>{inner}</details>"
                parts.append(fold if group else inner)
        return "".join(parts) + "</section>"

    def _legend(self) -> str:
        names = "".join(
            f'<button type="button" value="{look.number}" aria-pressed="false">'
            f"{self.swatches[name]}{escape(name)}</button>"
            for name, look in self.report.looks.items()
        )
        return f'<div class="legend" role="group" aria-label="Pick out methods">{names}</div>'

    def _table(self, table: Table) -> str:
        words = [' class="word"' if number in table.words else "" for number in range(len(table.columns))]
        head = "".join(f'<th scope="col"{word}>{escape(c)}</th>' for c, word in zip(table.columns, words, strict=True))
        rows = "".join(f"<tr>{self._row(table, row)}</tr>" for row in table.rows)
        notes = "".join(f'<p class="quiet">{escape(note)}</p>' for note in table.notes)
        grid = ' class="grid"' if table.grid else ""
        return (
            f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(table.title)}"><table{grid}>'
            f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>{notes}"
        )

    def _row(self, table: Table, row: tuple[Text, ...]) -> str:
        cells = []
        for number, text in enumerate(row):
            kinds = [kind for kind in (text.kind, "word" if number in table.words else "") if kind]
            small = f" <small>{escape(text.small)}</small>" if text.small else ""
            swatch = self.swatches[text.series] if text.series else ""
            content = f"{swatch}{escape(text.main)}{small}"
            attribute = f' class="{" ".join(kinds)}"' if kinds else ""
            row_head = ' scope="row"' if number == 0 else ""
            tag = "td" if number else "th"
            cells.append(f"<{tag}{row_head}{attribute}>{content}</{tag}>")
        return "".join(cells)

    def _failures(self) -> str:
        failures = self.report.summary.failures
        parts = ['<section id="failures"><h2>Failures</h2>']
        if not failures:
            parts.append("<p>None.</p>")
        for failure in failures:
            cases = ((f"{task}, item {item}", label) for task, item, label in failure.cases)
            rows = "".join(f"<li>{escape(where)}: {escape(label)}</li>" for where, label in cases)
            count = len(failure.cases)
            parts.append(
                f"<h3>{escape(failure.headline)}</h3><pre>{escape(failure.error)}</pre>"
                f"<details{' open' if count <= 10 else ''}><summary>All of them</summary><ul>{rows}</ul></details>"
            )
        return "".join(parts) + "</section>"


def _fact(name: str, value: str) -> str:
    return f"<code>{escape(value)}</code>" if name == "command" else escape(value)


def read(folder: Path) -> Report:
    """The report of a run's folder. InputError: the folder holds no run, or no result yet."""
    folder = Path(folder)
    plan, results = store.read_plan(folder), store.read_results(folder)
    if not results:
        raise InputError(f"{folder} has no results yet; run the evaluation first: foveakv eval run")
    tasks = _known(plan.tasks)
    titles = {task.name: task.title for task in tasks}
    controls = [task.name for task in tasks if not task.ranked]
    return Report(folder.resolve().name, Summary(plan, results, titles, controls), _starts(folder / store.RUN))


def write(report: Report, folder: Path) -> list[Path]:
    """Writes the page, the Markdown, the figures and the plots; returns their paths, the page first."""
    folder = Path(folder)
    files = {
        PAGE: report.html(),
        MARKDOWN: report.markdown(),
        FIGURES: json.dumps(tables.leaderboard_json(report.summary), indent=2, ensure_ascii=False) + "\n",
        **{f"{PLOTS}/{picture.name}.svg": picture.file() for picture in report.pictures},
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
    """The tasks that this version knows."""
    known = set(items.available())
    return [items.find(name) for name in names if name in known]


def _starts(path: Path) -> list[dict[str, object]]:
    if not path.is_file():
        return []
    try:
        return list(json.loads(path.read_text(encoding="utf8")).get("starts", []))
    except (ValueError, AttributeError, TypeError) as error:
        raise InputError(f"{path} is damaged: {error}; delete it to go without machine and versions") from error

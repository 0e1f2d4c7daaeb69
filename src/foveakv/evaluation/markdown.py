"""A report as Markdown."""

from __future__ import annotations

from typing import TYPE_CHECKING

from foveakv.evaluation import headline
from foveakv.evaluation.tables import Table, Text

if TYPE_CHECKING:
    from foveakv.evaluation.report import Report

_SPECIAL = str.maketrans({c: f"\\{c}" for c in "\\`*_{}[]<>#|~"})


def write(report: Report) -> str:
    """The whole report; plots are linked as files in `plots/`."""
    lines = [f"# {plain(report.title)}", "", headline.MEANING, ""]
    if report.warnings:
        lines += ["**Beware:**", "", *(f"- {plain(line)}" for line in report.warnings), ""]
    lines += [f"- {name}: {plain(value)}" for name, value in report.facts] + [""]
    for section in report.sections[:-1]:
        lines += [f"## {section.title}", "", *(line for text in section.lead for line in (plain(text), ""))]
        lines += [line for p in section.pictures for line in (f"![{plain(p.title)}](plots/{p.name}.svg)", "")]
        for _, table in section.tables:
            lines += ([f"### {plain(table.title)}", ""] if len(section.tables) > 1 else []) + render(table) + [""]
    lines += ["## Failures", ""]
    for failure in report.summary.failures:
        lines += [f"{plain(failure.headline)}. {plain(failure.error)}", ""]
        lines += [f"- {plain(task)}, item {item}: {plain(label)}" for task, item, label in failure.cases] + [""]
    if not report.summary.failures:
        lines += ["None.", ""]
    last = report.sections[-1]
    lines += [f"## {last.title}", "", *(f"- {plain(text)}" for text in last.lead)]
    return "\n".join(lines) + "\n"


def render(table: Table) -> list[str]:
    """Lines of a table and of its notes; marked cells are bold."""
    rule = [":---" if number in table.words else "---:" for number in range(len(table.columns))]
    lines = [_line([plain(column) for column in table.columns]), _line(rule)]
    lines += [_line([_cell(text) for text in row]) for row in table.rows]
    if table.notes:
        lines += [""] + [f"- {plain(note)}" for note in table.notes]
    return lines


def plain(text: str) -> str:
    """Text without line breaks in which nothing is markup."""
    return " ".join(text.split()).translate(_SPECIAL)


def _cell(text: Text) -> str:
    small = text.small if text.small.startswith("[") else f"({text.small})" if text.small else ""
    content = plain(f"{text.main} {small}")
    return f"**{content}**" if content and text.kind in ("better", "worse") else content


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"

"""A report as Markdown."""

from __future__ import annotations

from foveakv.evaluation.report import headline
from foveakv.evaluation.report.content import Report
from foveakv.evaluation.report.tables import Table, Text

_SPECIAL = str.maketrans({c: f"\\{c}" for c in "\\`*_{}[]<>#|~"})


def render(report: Report) -> str:
    """The report as Markdown text; plots are linked as files in `plots/`."""
    lines = [f"# {plain(report.title)}", "", headline.MEANING, ""]
    if report.warnings:
        lines += ["**Warnings:**", "", *(f"- {plain(line)}" for line in report.warnings), ""]
    lines += [f"- {name}: {plain(value)}" for name, value in report.facts] + [""]
    for section in report.sections[:-1]:
        lines += [f"## {section.title}", "", *(line for text in section.lead for line in (plain(text), ""))]
        lines += [line for p in section.plots for line in (f"![{plain(p.title)}](plots/{p.name}.svg)", "")]
        for _, table in section.tables:
            lines += ([f"### {plain(table.title)}", ""] if len(section.tables) > 1 else []) + table_lines(table) + [""]
    lines += ["## Failures", ""]
    for failure in report.summary.failures:
        lines += [f"{plain(failure.headline)}. {plain(failure.error)}", ""]
        lines += [f"- {plain(task)}, item {item}: {plain(label)}" for task, item, label in failure.cases] + [""]
    if not report.summary.failures:
        lines += ["None.", ""]
    last = report.sections[-1]
    lines += [f"## {last.title}", "", *(f"- {plain(text)}" for text in last.lead)]
    return "\n".join(lines) + "\n"


def table_lines(table: Table) -> list[str]:
    """A table and its notes, line by line; marked cells are bold."""
    rule = [":---" if number in table.words else "---:" for number in range(len(table.columns))]
    lines = [_line([plain(column) for column in table.columns]), _line(rule)]
    lines += [_line([_cell(text) for text in row]) for row in table.rows]
    if table.notes:
        lines += [""] + [f"- {plain(note)}" for note in table.notes]
    return lines


def plain(text: str) -> str:
    """The text on one line, with all Markdown markup escaped."""
    return " ".join(text.split()).translate(_SPECIAL)


def _cell(text: Text) -> str:
    small = text.small if text.small.startswith("[") else f"({text.small})" if text.small else ""
    content = plain(f"{text.main} {small}")
    return f"**{content}**" if content and text.kind in ("better", "worse") else content


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"

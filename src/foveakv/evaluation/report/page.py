"""The report as one HTML page that loads nothing from elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from foveakv.evaluation.report import headline
from foveakv.evaluation.report.content import Report, Section
from foveakv.evaluation.report.svg import swatch
from foveakv.evaluation.report.tables import Table

TEMPLATE = "report.html"


def render(report: Report) -> str:
    """The page. All text is escaped: labels, task names and errors may contain anything.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    environment = Environment(
        loader=PackageLoader("foveakv.evaluation.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    *sections, rules = report.sections
    return environment.get_template(TEMPLATE).render(
        report=report,
        meaning=headline.MEANING,
        looks=report.looks,
        # SVG from matplotlib, which escapes the labels in it; all other text is escaped by the template.
        swatches={look.number: Markup(swatch(look)) for look in report.looks.values()},
        inline={plot.name: Markup(plot.inline()) for plot in report.plots},
        sections=sections,
        rules=rules,
        groups=_groups,
        failures=report.summary.failures,
    )


def _groups(section: Section) -> Iterator[tuple[str, list[Table]]]:
    """The section's tables by group, in order."""
    for group, members in groupby(section.tables, key=lambda pair: pair[0]):
        yield group, [table for _, table in members]

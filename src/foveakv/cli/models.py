"""`foveakv models`: list the tested model families."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from foveakv.cli import common
from foveakv.util.tables import Column, FittedTable

if TYPE_CHECKING:
    from foveakv.engines.transformers.families import Family


@common.friendly
def models(
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print a Markdown table, as in docs/supported-models.md.")
    ] = False,
) -> None:
    """List the tested model families, and the ones that are not supported, with the reason."""
    common.quiet_transformers()
    from foveakv.engines.transformers.families import FAMILIES
    from foveakv.models.loading import KNOWN

    rows = [(family.model_type, family.title, family_status(family)) for family in FAMILIES]
    titles = ("model type", "family", "status")
    if markdown:
        rule = ("---",) * len(titles)
        typer.echo("\n".join("| " + " | ".join(row) + " |" for row in (titles, rule, *rows)))
        return
    out = common.output()
    known = [(model.name, f"{model.size:.2g} B", model.what, model.needs) for model in KNOWN]
    out.print(_table("models to start with", ("name for --model", "size", "model", "needs"), known))
    out.print()
    out.print(_table("families: any folder or hub id of one of these can be loaded", titles, rows))


def _table(title: str, titles: Sequence[str], rows: Iterable[Sequence[str]]) -> FittedTable:
    columns = [Column(each, text=i > 0 and each != "size", right=False) for i, each in enumerate(titles)]
    table = FittedTable(columns, title=title)
    for row in rows:
        table.add(*row)
    return table


def family_status(family: Family) -> str:
    """Whether a family is tested, with its note, or why it is not supported."""
    if family.reason:
        return f"not supported: {family.reason}"
    return f"tested; {family.note}" if family.note else "tested"

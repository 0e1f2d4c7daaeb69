"""`foveakv eval report`: write the tables and plots of a run as HTML, Markdown and JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from foveakv.cli import common
from foveakv.cli.common import DebugOption


@common.friendly
def report(
    run: Annotated[Path, typer.Argument(help="The folder of a `foveakv eval run`.")],
    out: Annotated[
        Path | None, typer.Option(help="The folder to write to (default: `report` in the run's folder).")
    ] = None,
    debug: DebugOption = False,
) -> None:
    """Write report.html, report.md, leaderboard.json and plots of a run.

    The report of an unfinished run says that it is unfinished.

    Example: foveakv eval report runs/offline
    """
    from foveakv.evaluation.report import files as reports

    with common.messages().status("writing the report"):
        found = reports.read(run)
        paths = reports.write(found, out or run / "report")
    for line in found.warnings:
        common.messages().print(f"note: {line}", highlight=False, markup=False, soft_wrap=True)
    for path in paths[:3]:
        common.say_written(path)
    common.messages().print(f"wrote {len(paths) - 3} plots to {paths[0].parent / reports.PLOTS}", highlight=False,
                            markup=False, soft_wrap=True)  # fmt: skip

"""Shared by the analyses: checking and writing their files, tables of figures, and the progress line."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.markup import escape

from foveakv.cli import common, prompts
from foveakv.util import files
from foveakv.util.tables import Column, FittedTable


def check_files(json: Path | None, csv: Path | None, plot: Path | None) -> None:
    """Check before any work that the result can be written. Errors: OutputError, InputError, MissingDependencyError."""
    files.check_output_files(json, csv, plot)
    common.check_plot_files(plot)


def measure(work: Callable[[Callable[[str], None]], Any]) -> Any:
    """Run `work(progress)` with a line on stderr that names the prompt being read."""
    with common.messages().status("reading the prompt") as status:
        return work(lambda label: status.update(f"reading {escape(label)}"))


def figures(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> FittedTable:
    """A table of figures; the first column names the rows."""
    first, *others = columns
    table = FittedTable([Column(first, text=True, right=False), *map(Column, others)], title=title)
    for row in rows:
        table.add(*row)
    return table


def write(result: Any, model: Any, json: Path | None, csv: Path | None, plot: Path | None, drawing: str) -> None:
    """Write the files that were asked for. drawing: a function of `foveakv.analysis.plots`."""
    from foveakv.evaluation import environment

    if json is not None:
        files.write_json(json, {**result.to_dict(), "environment": environment.describe(model)})
    if csv is not None:
        prompts.write_csv(csv, result.rows())
    if plot is not None:
        from foveakv.analysis import plots as analysis_plots

        getattr(analysis_plots, drawing)(plot, result)
    common.say_written(json, csv, plot)

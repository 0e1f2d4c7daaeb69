"""`foveakv eval`: evaluations on tasks with known answers, and their reports."""

from __future__ import annotations

import typer

from foveakv.cli.eval.report import report
from foveakv.cli.eval.run import run

evaluation = typer.Typer(help="Evaluate methods on tasks with known answers and write reports.", no_args_is_help=True)
for command in (run, report):
    evaluation.command()(command)

__all__ = ["evaluation"]

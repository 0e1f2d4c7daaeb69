"""The `foveakv` command and its parts."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from foveakv import __version__
from foveakv.cli import common
from foveakv.cli.analyze import analyze
from foveakv.cli.compare import compare
from foveakv.cli.eval import evaluation
from foveakv.cli.generate import generate
from foveakv.cli.info import doctor, methods, models
from foveakv.cli.kernels import kernels
from foveakv.cli.show import show
from foveakv.cli.tune import tune
from foveakv.cli.visual_heads import visual_heads

app = typer.Typer(
    name="foveakv",
    help="Compress the key-value cache of vision-language models, and see what it costs.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (generate, compare, show, tune, methods, models, doctor):
    app.command()(command)
analyze.command()(visual_heads)
app.add_typer(evaluation, name="eval")
app.add_typer(analyze, name="analyze")
app.add_typer(kernels, name="kernels")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"foveakv {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and stop.")
    ] = False,
    plugin: Annotated[
        list[Path] | None,
        typer.Option(help="A Python file that registers methods of your own; its code is run. Repeat it for more."),
    ] = None,
) -> None:
    """Compress the key-value cache of vision-language models, and see what it costs."""
    # libgomp's threads spin for milliseconds at every barrier, which on a machine with other work makes a decoding step
    # up to a hundred times slower. A short spin avoids that. Read when torch is first imported.
    os.environ.setdefault("GOMP_SPINCOUNT", "2000")
    if plugin:
        _load_plugins(plugin)


@common.friendly
def _load_plugins(files: list[Path]) -> None:
    from foveakv.methods.plugins import load_file

    for file in files:
        load_file(file)

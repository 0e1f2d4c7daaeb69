"""The `foveakv` command and its subcommands."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from foveakv import __version__
from foveakv.cli import common
from foveakv.cli.analyze import analyze
from foveakv.cli.compare import compare
from foveakv.cli.doctor import doctor
from foveakv.cli.eval import evaluation
from foveakv.cli.generate import generate
from foveakv.cli.kernels import kernels
from foveakv.cli.methods import methods
from foveakv.cli.models import models
from foveakv.cli.serve import serve
from foveakv.cli.show import show
from foveakv.cli.tune import tune

app = typer.Typer(
    name="foveakv",
    help="Compress the key-value cache of vision-language models and measure what it costs.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (generate, compare, show, tune, serve, methods, models, doctor):
    app.command()(command)
app.add_typer(evaluation, name="eval")
app.add_typer(analyze, name="analyze")
app.add_typer(kernels, name="kernels")


def main() -> None:
    """Entry point of `foveakv` and `python -m foveakv`; exits with the command's code.

    A full or closed stdout is an error like any other: one line on stderr and exit code 2. A reader that has gone
    (`foveakv ... | head`) ends the command silently with exit code 1, as usual for Python programs.
    """
    try:
        if sys.stdout is None:
            common.fail("standard output is closed")
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="backslashreplace")  # a terminal may not know every character
        try:
            app()
        except SystemExit as end:
            if end.code:  # its message has been printed
                _discard_stdout_if_full()
            else:
                common.flush_stdout()  # at exit Python would print a traceback of its own
            raise
    except typer.Exit as error:
        sys.exit(error.exit_code)
    except BrokenPipeError:
        _discard_stdout()
        sys.exit(1)
    except OSError as error:
        _discard_stdout()
        with contextlib.suppress(OSError, typer.Exit):
            common.fail(f"standard output: {error.strerror or error}")
        sys.exit(common.EXIT_CODE)


def _discard_stdout_if_full() -> None:
    try:
        common.flush_stdout()
    except OSError:
        _discard_stdout()


def _discard_stdout() -> None:
    """Send what is still buffered to the null device, so that nothing fails again when Python exits."""
    null = os.open(os.devnull, os.O_WRONLY)
    with contextlib.suppress(OSError, ValueError):
        os.dup2(null, sys.stdout.fileno())
    os.close(null)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"foveakv {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    plugin: Annotated[
        list[Path] | None,
        typer.Option(help="A Python file that registers your own methods. Its code is run. Repeat it for several."),
    ] = None,
) -> None:
    """Compress the key-value cache of vision-language models and measure what it costs."""
    # libgomp's threads spin for milliseconds at every barrier, which on a busy machine makes a decode step up to a
    # hundred times slower. A short spin avoids that. The variable is read when torch is first imported.
    os.environ.setdefault("GOMP_SPINCOUNT", "2000")
    if plugin:
        _load_plugins(plugin)


@common.friendly
def _load_plugins(files: list[Path]) -> None:
    from foveakv.methods.plugins import load_file

    for file in files:
        load_file(file)

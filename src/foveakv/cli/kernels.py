"""`foveakv kernels`: the attention kernels of this machine, and building the CPU's ahead of its first use."""

from __future__ import annotations

from typing import Annotated

import typer

from foveakv.cli import common
from foveakv.cli.common import DebugOption
from foveakv.errors import MissingDependencyError

kernels = typer.Typer(help="The attention kernels of this machine.", no_args_is_help=True)


@kernels.command()
@common.friendly
def build(
    force: Annotated[bool, typer.Option("--force", help="Compile it even if it is there.")] = False,
    debug: DebugOption = False,
) -> None:
    """Compile the CPU kernel now, and say where it is. Without this it is done when it is first needed.

    Needs a C++ compiler (g++ or clang++; CXX names another). Example: foveakv kernels build
    """
    from foveakv.kernels import build as builder

    try:
        path = builder.build(force=force)
        builder.load(path)
    except builder.BuildError as error:
        raise MissingDependencyError(f"the CPU kernel was not built: {error}") from error
    common.output().print(f"{builder.instructions()}: {path}", markup=False, highlight=False, soft_wrap=True)


@kernels.command(name="list")
@common.friendly
def list_() -> None:
    """List the backends, and why one cannot be used here. Builds nothing."""
    from foveakv.evaluation.environment import kernels as state
    from foveakv.kernels import build as builder

    out = common.output()
    for name, description in state().items():
        out.print(f"{name:10} {description}", markup=False, highlight=False, soft_wrap=True)
    out.print(f"built kernels are kept in {builder.folder()}", markup=False, highlight=False, soft_wrap=True)

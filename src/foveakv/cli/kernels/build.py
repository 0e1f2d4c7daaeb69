"""`foveakv kernels build`: compile the CPU kernel before its first use."""

from __future__ import annotations

from typing import Annotated

import typer

from foveakv.cli import common
from foveakv.cli.common import DebugOption
from foveakv.errors import MissingDependencyError


@common.friendly
def build(
    force: Annotated[bool, typer.Option("--force", help="Compile it even if it is already built.")] = False,
    debug: DebugOption = False,
) -> None:
    """Compile the CPU kernel now and print its path. Otherwise it is compiled on first use.

    Needs a C++ compiler (g++ or clang++; CXX names another). Example: foveakv kernels build
    """
    from foveakv.kernels import build as builder

    try:
        path = builder.build(force=force)
        builder.load(path)
    except builder.BuildError as error:
        raise MissingDependencyError(f"the CPU kernel was not built: {error}") from error
    common.output().print(f"{builder.instructions()}: {path}", markup=False, highlight=False, soft_wrap=True)

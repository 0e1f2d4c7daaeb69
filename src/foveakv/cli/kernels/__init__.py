"""`foveakv kernels`: the attention kernels of this machine."""

from __future__ import annotations

import typer

from foveakv.cli.kernels.build import build
from foveakv.cli.kernels.list import list_

kernels = typer.Typer(help="List or build the attention kernels of this machine.", no_args_is_help=True)
kernels.command()(build)
kernels.command(name="list")(list_)

__all__ = ["kernels"]

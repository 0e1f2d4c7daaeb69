"""`foveakv analyze`: measure what the methods rely on, for one model and a set of prompts."""

from __future__ import annotations

import typer

from foveakv.cli.analyze.eviction import eviction
from foveakv.cli.analyze.heads import heads
from foveakv.cli.analyze.sparsity import sparsity
from foveakv.cli.analyze.visual_heads import visual_heads

analyze = typer.Typer(help="Measure what the methods rely on: heads, sparsity, eviction.", no_args_is_help=True)
for command in (heads, sparsity, eviction, visual_heads):
    analyze.command()(command)

__all__ = ["analyze"]

"""Options that several benchmarks have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Contexts = Annotated[list[int] | None, typer.Option("--context", help="Prompt tokens; repeat for several.")]
Budgets = Annotated[list[float] | None, typer.Option("--budget", help="Share of the prompt; repeat for several.")]
Methods = Annotated[list[str] | None, typer.Option("--method", help="Repeat for several; default: the main ones.")]
Geometry = Annotated[str, typer.Option(help="qwen2.5-vl-7b, qwen2.5-vl-3b, llava-1.5 or demo.")]
Dtype = Annotated[str, typer.Option(help="fp32 or bf16.")]
Backend = Annotated[str, typer.Option(help="Decode kernel, see foveakv.kernels.BACKENDS.")]
DigestDtype = Annotated[str | None, typer.Option(help="hybridkv's option of that name.")]
Repeats = Annotated[int | None, typer.Option(help="Rounds in which every side runs once.")]
Seed = Annotated[int, typer.Option()]
Label = Annotated[str, typer.Option(help="Result file NAME-LABEL.json, for a second run with other settings.")]
Out = Annotated[Path, typer.Option(help="Folder of the result file.")]
Quick = Annotated[bool, typer.Option("--quick", help="Tiny sizes, takes seconds; not a measurement.")]
Resume = Annotated[
    bool, typer.Option("--resume", help="Keep the rows of the result file and measure the missing ones.")
]

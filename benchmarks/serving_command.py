"""The command `python -m benchmarks run serving`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from benchmarks import common
from benchmarks import serving as bench
from benchmarks.serving_table import table_of


def serving(
    context: Annotated[int | None, typer.Option(help="Prompt tokens, about.")] = None,
    budget: Annotated[float, typer.Option(help="Share of the prompt.")] = 0.1,
    method: Annotated[list[str] | None, typer.Option(help="Repeat for several.")] = None,
    tokens: Annotated[list[int] | None, typer.Option(help="New tokens of an answer; repeat for several.")] = None,
    clients: Annotated[int | None, typer.Option(help="Requests that come at once.")] = None,
    pool: Annotated[int, typer.Option(help="KV memory, in requests that are stored whole.")] = 2,
    stall: Annotated[float, typer.Option(help="Seconds that a prompt is read for between two decode steps.")] = 0.1,
    dtype: Annotated[str, typer.Option(help="fp32 or bf16.")] = "fp32",
    seed: Annotated[int, typer.Option()] = common.SEED,
    label: Annotated[str, typer.Option(help="Result file serving-LABEL.json.")] = "",
    out: Annotated[Path, typer.Option(help="Folder of the result file.")] = common.RESULTS,
    quick: Annotated[bool, typer.Option("--quick", help="Tiny sizes, takes seconds; not a measurement.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Measure the rows that are missing.")] = False,
) -> None:
    """Many requests at once in a fixed KV memory: one at a time, stored whole, and compressed."""
    settings = {
        "model": "tiny" if quick else "demo",
        "context": context or (160 if quick else 1024),
        "budget": budget,
        "methods": method or ["hae", "hybridkv", "snapkv"],
        "tokens": tokens or ([4] if quick else [96, 256]),
        "clients": clients or (4 if quick else 16),
        "pool": pool,
        "stall": stall,
        "dtype": dtype,
        "seed": seed,
    }
    recorder = common.Recorder("serving", bench.BY, settings, folder=out, label=label, quick=quick, resume=resume)
    bench.run(recorder)
    Console().print(table_of(recorder.finish()["rows"]))
    Console().print(f"written: {recorder.path}")

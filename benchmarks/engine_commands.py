"""Commands of the benchmarks of whole engines: vLLM."""

from __future__ import annotations

from typing import Annotated

import typer

from benchmarks import common
from benchmarks.measure import measure
from benchmarks.options import Label, Out, Quick, Repeats, Resume


def vllm(
    share: Annotated[float, typer.Option(help="Visual tokens to keep.")] = 0.25,
    blocks: Annotated[int, typer.Option(help="Blocks of 32 tokens in the pool.")] = 40,
    requests: Annotated[int | None, typer.Option(help="Requests that are sent at once.")] = None,
    tokens: Annotated[int | None, typer.Option(help="New tokens of each.")] = None,
    task: Annotated[str, typer.Option(help="Task of the evaluation whose prompts are used.")] = "cards-4",
    threads: Annotated[int, typer.Option(help="Threads of each engine.")] = 1,
    repeats: Repeats = None,
    label: Label = "",
    out: Out = common.RESULTS,
    quick: Quick = False,
    resume: Resume = False,
) -> None:
    """The embedded model in vLLM under load, with and without the plugin, and the time of scoring."""
    settings = {
        "share": share,
        "blocks": blocks,
        "requests": requests or (2 if quick else 10),
        "tokens": tokens or (4 if quick else 32),
        "task": task,
        "scored": "cards-4" if quick else "cards-16",
        "threads": threads,
        "repeats": repeats or (1 if quick else 3),
        "prompts": 1 if quick else 5,
    }
    measure("vllm", settings, out=out, label=label, quick=quick, resume=resume)


def vllm_accuracy(
    task: Annotated[list[str] | None, typer.Option(help="Tasks of the evaluation; repeat for several.")] = None,
    share: Annotated[list[float] | None, typer.Option(help="Visual tokens to keep; repeat for several.")] = None,
    items: Annotated[int | None, typer.Option(help="Items of each task.")] = None,
    threads: Annotated[int, typer.Option(help="Threads of each engine.")] = 1,
    label: Label = "",
    out: Out = common.RESULTS,
    quick: Quick = False,
    resume: Resume = False,
) -> None:
    """The evaluation's tasks through vLLM and through transformers: scores, kept tokens, answers."""
    settings = {
        "tasks": task or (["cards-1"] if quick else ["cards-4", "chart", "photos", "row", "reading"]),
        "shares": share or ([0.2] if quick else [0.1, 0.2, 0.4]),
        "items": items or (1 if quick else 10),
        "threads": threads,
    }
    measure("vllm_accuracy", settings, out=out, label=label, quick=quick, resume=resume)

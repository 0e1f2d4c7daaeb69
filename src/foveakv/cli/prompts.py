"""One or several prompts as the analyses take them: `--prompt` with `--image`, or the embedded model's samples."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from foveakv.cli import common
from foveakv.errors import InputError
from foveakv.util import files

PromptsOption = Annotated[
    list[str] | None,
    typer.Option("--prompt", "-p", help="A question; repeat it for several. `<image>` marks where each picture goes."),
]
SamplesOption = Annotated[
    list[int] | None,
    typer.Option("--sample", min=1, help="The embedded model's prompt with this many pictures; repeat it for more."),
]
KindsOption = Annotated[
    list[str] | None,
    typer.Option(help="What sample pictures show: digit (default), number or word; repeat it for several."),
]
AskOption = Annotated[
    list[int] | None,
    typer.Option(help="The sample card that is asked for, from 0, -1 for all; repeat it for several."),
]
JsonOption = Annotated[Path | None, typer.Option("--json", help="Write all figures here.")]
CsvOption = Annotated[Path | None, typer.Option("--csv", help="Write the figures here as a table.")]
PlotOption = Annotated[Path | None, typer.Option("--plot", help="Draw them into this picture.")]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", help="A setting of the method as key=value; repeat it for more.")
]


@dataclass(frozen=True)
class Task:
    """A prompt with its pictures. label: what tables and plots call it."""

    label: str
    text: str
    pictures: Sequence[Any]
    captions: Sequence[str]
    question: str


def tasks(
    model: str,
    images: list[str] | None,
    prompts: list[str] | None,
    samples: list[int] | None,
    kinds: list[str] | None = None,
    asks: list[int] | None = None,
) -> list[Task]:
    """Every prompt with all pictures, or every sample in every kind, asked every way.

    Raises:
        InputError: both or neither are given, a picture cannot be read, or there is no such sample.
    """
    if bool(samples) == bool(prompts):
        raise InputError("give either --prompt (with --image) or --sample N")
    if samples:
        if model != "demo" or images:
            raise InputError(
                "--sample is a prompt of the embedded model: leave --image out, and --model too (or say demo)"
            )
        every_ask: list[int | None] = [*asks] if asks else [None]
        made = [_sample(count, kind, ask) for count in samples for kind in kinds or ["digit"] for ask in every_ask]
    else:
        if kinds or asks:
            raise InputError("--sample-kind and --ask choose among sample prompts; give --sample N as well")
        from foveakv.models.inputs import read_images

        files = images or []
        pictures, captions = read_images(files), [Path(name).name for name in files]
        made = [Task(_short(text), text, pictures, captions, text) for text in prompts or []]
    repeated = {task.label for task in made if sum(task.label == other.label for other in made) > 1}
    return [
        task if task.label not in repeated else Task(f"{i + 1}: {task.label}", *list(vars(task).values())[1:])
        for i, task in enumerate(made)
    ]


def one_task(*given: Any) -> Task:
    """As `tasks`, for commands that take a single prompt."""
    made = tasks(*given)
    if len(made) > 1:
        raise InputError(f"this command takes one prompt, and these are {len(made)}")
    return made[0]


def _sample(count: int, kind: str, ask: int | None) -> Task:
    from foveakv.models.embedded import sample_prompt

    sample = sample_prompt(count, kind=kind, ask=ask)
    label = f"{count} {kind}s"
    if ask is not None:
        label += ", all" if ask < 0 else f", card {ask + 1}"
    return Task(label, sample.text, sample.images, sample.captions, sample.question.strip())


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 28 else line[:25] + "..."


def load(model: str, every: Sequence[Task], **options: Any) -> tuple[Any, dict[str, Any]]:
    """Model and processor as `common.load_model` gives them, and the inputs of every task by its label."""
    from foveakv.models.inputs import build_inputs

    loaded = common.load_model(model, **options)
    made = {task.label: build_inputs(loaded.processor, task.text, task.pictures, model=loaded.model) for task in every}
    return loaded, made


def write_csv(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """One line per row, with the names of the first row's entries on top; None is an empty field."""
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    with files.replacing(path) as temporary:
        temporary.write_text(text.getvalue(), encoding="utf8")

"""Prompts of the analyses: `--prompt` with `--image`, or sample prompts of the embedded model."""

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
    typer.Option("--prompt", "-p", help="A question. `<image>` marks the place of each image. Repeat it for several."),
]
SamplesOption = Annotated[
    list[int] | None,
    typer.Option("--sample", min=1, help="The embedded model's sample prompt with N images. Repeat it for several."),
]
KindsOption = Annotated[
    list[str] | None,
    typer.Option(help="What the sample images show: digit (default), number or word. Repeat it for several."),
]
AskOption = Annotated[
    list[int] | None,
    typer.Option(help="Index of the sample card to ask for, -1 for all. Repeat it for several."),
]
JsonOption = Annotated[Path | None, typer.Option("--json", help="Write all figures to this JSON file.")]
CsvOption = Annotated[Path | None, typer.Option("--csv", help="Write the figures to this CSV file.")]
PlotOption = Annotated[Path | None, typer.Option("--plot", help="Draw the figures into this image file.")]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", help="An option of the method as key=value. Repeat it for several.")
]


@dataclass(frozen=True)
class Task:
    """A prompt with its images. label: its name in tables and plots; captions: one per image."""

    label: str
    text: str
    images: Sequence[Any]
    captions: Sequence[str]
    question: str


def tasks(
    model: str,
    images: list[str] | None,
    prompts: list[str] | None,
    samples: list[int] | None,
    kinds: list[str] | None = None,
    asks: list[int] | None = None,
    *,
    allow_urls: bool = False,
) -> list[Task]:
    """Every prompt with all images, or every sample prompt with every kind and card.

    Raises:
        InputError: both or neither are given, an image cannot be read, or there is no such sample.
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
            raise InputError("--sample-kind and --ask belong to sample prompts; give --sample N as well")
        read, captions = load_images(images, allow_urls)
        made = [Task(_short(text), text, read, captions, text) for text in prompts or []]
    repeated = {task.label for task in made if sum(task.label == other.label for other in made) > 1}
    return [
        task if task.label not in repeated else Task(f"{i + 1}: {task.label}", *list(vars(task).values())[1:])
        for i, task in enumerate(made)
    ]


def one_task(*given: Any, allow_urls: bool = False) -> Task:
    """As `tasks`, for commands that take a single prompt."""
    made = tasks(*given, allow_urls=allow_urls)
    if len(made) > 1:
        raise InputError(f"this command takes one prompt; {len(made)} were given")
    return made[0]


def _sample(count: int, kind: str, ask: int | None) -> Task:
    from foveakv.models.embedded import sample_prompt

    sample = sample_prompt(count, kind=kind, ask=ask)
    label = f"{count} {kind}s"
    if ask is not None:
        label += ", all" if ask < 0 else f", card {ask + 1}"
    return Task(label, sample.text, sample.images, sample.captions, sample.question.strip())


def load_images(sources: Sequence[str] | None, allow_urls: bool) -> tuple[list[Any], list[str]]:
    """Read the images of `--image`; return them with short names for tables and plots. InputError: see `read_image`."""
    from foveakv.models.images import image_name, read_images

    sources = sources or []
    return read_images(sources, allow_urls=allow_urls), [image_name(each, i + 1) for i, each in enumerate(sources)]


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 28 else line[:25] + "..."


def load(model: str, every: Sequence[Task], **options: Any) -> tuple[Any, dict[str, Any]]:
    """Load model and processor with `common.load_model`, and build the inputs of every task, by its label."""
    from foveakv.models.inputs import build_inputs

    loaded = common.load_model(model, **options)
    made = {task.label: build_inputs(loaded.processor, task.text, task.images, model=loaded.model) for task in every}
    return loaded, made


def write_csv(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write one line per row below the keys of the first row. None is an empty field. OutputError: see `replacing`."""
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    files.write_text(path, text.getvalue())

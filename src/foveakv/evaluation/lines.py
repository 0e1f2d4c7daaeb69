"""Read files that users write, with one JSON object per line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from foveakv.errors import InputError
from foveakv.evaluation import schema

K = TypeVar("K")
T = TypeVar("T")


@dataclass(frozen=True)
class PromptLine:
    """A prompt and the file names of its images."""

    prompt: str
    images: tuple[str, ...] = ()


def read_lines(file: Path, kind: type[K], make: Callable[[int, K], T], example: str) -> list[T]:
    """Reads a file, and returns `make(line number, line)` for every line that is not blank.

    Args:
        file: UTF-8 text with one JSON object per line.
        kind: a data class with the fields of a line, see `foveakv.evaluation.schema`.
        make: called with the number of a line, from 1, and its `kind`.
        example: a line, shown if the file is missing.

    Raises:
        InputError: the file is missing, empty or cannot be read, or a line is wrong; the message has its number.
    """
    if not file.is_file():
        raise InputError(f"{file} is missing; it needs one line per entry, such as {example}")
    try:
        data = file.read_bytes()
    except OSError as error:
        raise InputError(f"cannot read {file}: {error.strerror or error}") from error
    found = []
    for number, line in enumerate(data.split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            found.append(make(number, schema.read(kind, schema.loads(line))))
        except ValueError as error:  # InputError included
            raise InputError(f"{file}, line {number}: {error}") from error
    if not found:
        raise InputError(f"{file} has no lines; it needs one per entry, such as {example}")
    return found

"""Files of one JSON object per line, as users write them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from foveakv.errors import InputError

T = TypeVar("T")


def read_lines(file: Path, parse: Callable[[int, dict[str, Any]], T], keys: Sequence[str], example: str) -> list[T]:
    """What `parse(number, entry)` makes of every line; numbers start at 1, empty lines are passed over.

    InputError: the file is missing (the message shows the example), a line is damaged or has a key other than `keys`
    (its number), or there is none.
    """
    if not file.is_file():
        raise InputError(f"{file} is missing; it has a line like this for each: {example}")
    found = []
    try:
        text = file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read {file}: {error}") from error
    for number, line in enumerate(text.split("\n"), start=1):  # splitlines() cuts at marks that JSON allows in texts
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            unknown = [key for key in entry if key not in keys]
            if unknown:
                raise InputError(f"unknown key {unknown[0]!r}; a line has {', '.join(keys)}")
            found.append(parse(number, entry))
        except InputError as error:
            raise InputError(f"{file}, line {number}: {error}") from error
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise InputError(f"{file}, line {number}: {type(error).__name__}: {error}") from error
    if not found:
        raise InputError(f"{file} has no line")
    return found


def prompt_of(entry: dict[str, Any]) -> tuple[str, list[str]]:
    """The text and the names of the pictures in a line. TypeError: they are something else."""
    text, names = entry["prompt"], entry.get("images", [])
    if not isinstance(text, str) or not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise TypeError("prompt is a text and images a list of names")
    return text, names

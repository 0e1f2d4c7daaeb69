"""Files of one JSON object per line, as users write them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from foveakv.errors import InputError

T = TypeVar("T")


def read_lines(file: Path, parse: Callable[[int, dict[str, Any]], T], example: str) -> list[T]:
    """What `parse(number, entry)` makes of every line; numbers start at 1, empty lines are passed over.

    InputError: the file is missing (the message shows the example), a line is damaged (its number), or there is none.
    """
    if not file.is_file():
        raise InputError(f"{file} is missing; it has a line like this for each: {example}")
    found = []
    for number, line in enumerate(file.read_text(encoding="utf8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            found.append(parse(number, json.loads(line)))
        except InputError as error:
            raise InputError(f"{file}, line {number}: {error}") from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InputError(f"{file}, line {number}: {type(error).__name__}: {error}") from error
    if not found:
        raise InputError(f"{file} has no line")
    return found

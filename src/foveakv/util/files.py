"""Files that are written whole or not at all."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from foveakv.errors import InputError


def check_output_files(*paths: Path | None) -> None:
    """InputError, before any work, when one of these files could not be written later, or two are the same."""
    wanted = [path for path in paths if path is not None]
    for place, path in enumerate(wanted):
        if path.is_dir():
            raise InputError(f"{path} is a folder; give the name of a file")
        if path in wanted[:place]:
            raise InputError(f"{path} is asked for twice; give every file its own name")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"cannot make the folder for {path}: {error}") from error
        if not os.access(path.parent, os.W_OK):
            raise InputError(f"cannot write to the folder of {path}")


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary file beside `path` that takes its place at the end of the block, or vanishes with an error."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}-", suffix=path.suffix)
    os.close(descriptor)
    temporary = Path(name)
    try:
        yield temporary
        temporary.chmod(0o644)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Text as UTF-8; what is no text (half a surrogate pair) becomes the escape that JSON has for it."""
    with replacing(path) as temporary, temporary.open("w", encoding="utf8", errors="backslashreplace") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def write_json(path: Path, data: Any) -> None:
    """Values as JSON, two spaces deep."""
    write_text(path, json.dumps(data, indent=2, ensure_ascii=False) + "\n")

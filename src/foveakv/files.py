"""Files that are written whole or not at all."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any


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

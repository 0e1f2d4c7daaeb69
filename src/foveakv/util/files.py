"""Output files: checked before any work, written whole or not at all."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from foveakv.errors import OutputError

_PROBE = 64 * 1024
"""Bytes that the check writes to find a full disk or an exhausted quota."""


def check_output_files(*paths: str | os.PathLike[str] | None) -> None:
    """Check that every file can be written, before any work is done. None is ignored.

    Symbolic links are followed. For a regular file a temporary file of 64 KiB is written to its folder and removed,
    which finds read-only folders and full disks; for a missing folder the parent that exists is checked. Pipes and
    devices are checked for permission only.

    Raises:
        OutputError: one of the files cannot be written, or two of them are the same file.
    """
    seen: set[str] = set()
    for path in (Path(path) for path in paths if path is not None):
        with _explained(path):
            target = _target(path)
            name = os.path.realpath(path)
            if name in seen:
                raise OutputError(f"two outputs go to {path}; give each its own file")
            seen.add(name)
            if target is not None:
                folder = next(parent for parent in target.parents if parent.exists())
                with _temporary(folder, "") as probe:
                    probe.write_bytes(bytes(_PROBE))


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary file that takes the place of `path` at the end of the block, or is removed on an error.

    Missing folders are created. The temporary file has the suffix of `path`. A symbolic link keeps pointing at its
    target, which is replaced; an existing file keeps its permissions. Pipes and character devices (/dev/stdout) are
    not replaced: the content is copied into them at the end of the block.

    Raises:
        OutputError: the file cannot be written. An OSError inside the block is reported as one.
    """
    path = Path(path)
    with _explained(path):
        target = _target(path)
        folder = Path(tempfile.gettempdir()) if target is None else target.parent
        folder.mkdir(parents=True, exist_ok=True)
        with _temporary(folder, path.suffix) as temporary:
            yield temporary
            if target is None:
                _copy_into(path, temporary)
                return
            with contextlib.suppress(FileNotFoundError):
                temporary.chmod(stat.S_IMODE(target.stat().st_mode))
            temporary.replace(target)


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write text as UTF-8. Lone surrogates are written as escapes, as JSON has them. OutputError: see `replacing`."""
    with replacing(path) as temporary, temporary.open("w", encoding="utf8", errors="backslashreplace") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def write_json(path: str | os.PathLike[str], data: Any) -> None:
    """Write values as JSON with an indent of two spaces. OutputError: see `replacing`."""
    write_text(path, json.dumps(data, indent=2, ensure_ascii=False) + "\n")


def save_figure(figure: Any, path: str | os.PathLike[str]) -> None:
    """Write a matplotlib figure in the format of the file's suffix. OutputError: see `replacing`."""
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=110)


def _target(path: Path) -> Path | None:
    """The regular file that a write replaces, with links followed; None where the content is written into `path`."""
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return Path(os.path.realpath(path))
    except ValueError:
        raise OutputError(f"{str(path)!r} is not a file name") from None
    if stat.S_ISDIR(found.st_mode):
        raise OutputError(f"{path} is a folder; give the name of a file")
    if stat.S_ISBLK(found.st_mode) or stat.S_ISSOCK(found.st_mode):
        raise OutputError(f"{path} is a {'disk' if stat.S_ISBLK(found.st_mode) else 'socket'}; give the name of a file")
    if not os.access(path, os.W_OK):
        raise OutputError(f"cannot write {path}: it is write-protected")
    if stat.S_ISREG(found.st_mode) and _stream_of(found) is None:
        return Path(os.path.realpath(path))
    return None


def _stream_of(found: os.stat_result) -> int | None:
    """The descriptor of stdout or stderr where that is the file in question, as with /dev/stdout."""
    for descriptor in (1, 2):
        with contextlib.suppress(OSError):
            if os.path.samestat(found, os.fstat(descriptor)):
                return descriptor
    return None


def _copy_into(path: Path, source: Path) -> None:
    descriptor = _stream_of(os.stat(path))
    if descriptor is None:
        opened = open(path, "wb")  # noqa: SIM115 (closed below)
    else:
        # Opening it by name would truncate what was written to it before.
        (sys.stdout if descriptor == 1 else sys.stderr).flush()
        opened = os.fdopen(os.dup(descriptor), "wb")
    with opened, source.open("rb") as content:
        shutil.copyfileobj(content, opened)


@contextlib.contextmanager
def _temporary(folder: Path, suffix: str) -> Iterator[Path]:
    """A new empty file with the permissions of the process's umask, removed at the end of the block."""
    temporary = folder / f".foveakv-{secrets.token_hex(8)}{suffix}"
    try:
        temporary.open("xb").close()
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Report an OSError as an OutputError that names the file."""
    try:
        yield
    except OutputError:
        raise
    except BrokenPipeError:
        raise OutputError(f"cannot write {path}: its reader has closed it") from None
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror or error}") from error

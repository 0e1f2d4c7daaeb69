"""The folder of a run.

    plan.json               what to run
    run.json                every start: time, number of workers, machines, versions
    results/WORKER.jsonl    one result per line, in the order of computation

Every result is flushed to disk, so killing the run loses only the items in progress. An incomplete last line is
ignored, and removed when the run is resumed.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import IO, Any, TypedDict

from filelock import FileLock, Timeout

from foveakv.errors import InputError, OutputError, StoreError
from foveakv.evaluation import schema
from foveakv.evaluation.plan import Key, Plan
from foveakv.evaluation.results import Result
from foveakv.util import files


class _Model(TypedDict, total=False):
    """The part of `environment.describe`'s model that reports show."""

    name: str | None
    revision: str | None
    parameters: schema.Count | None
    dtype: str | None
    device: str | None
    attention: str | None


class _Machine(TypedDict, total=False):
    """The part of `environment.describe` that reports show."""

    versions: dict[str, str | None]
    cpu: str | None
    accelerator: str | None
    threads: schema.Count | None
    model: _Model | None


class _Start(TypedDict, total=False):
    time: str
    workers: schema.Count
    command: str
    machines: list[_Machine]


@dataclass(frozen=True)
class _Run:
    """The content of run.json."""

    starts: tuple[_Start, ...]


_WHO = ("task", "item", "seed", "method", "budget", "label", "settings")
PLAN, RUN, RESULTS, LOCK = "plan.json", "run.json", "results", ".lock"


def read_plan(folder: Path) -> Plan:
    """The plan of a run. InputError: there is none, it is damaged, or another version wrote it."""
    path = Path(folder) / PLAN
    if not path.is_file():
        raise InputError(f"{folder} is not the folder of a run: it has no {PLAN}")
    data = schema.load_object(path)
    try:
        return Plan.from_dict(data)
    except InputError as error:
        raise InputError(f"{path}: {error}") from error


def read_results(folder: Path) -> list[Result]:
    """The results of a run, one per key. Of several with the same key, the last one without an error counts.

    Raises:
        InputError: a line is not a result; the message has the file and the line number.
    """
    found: dict[Key, Result] = {}
    for path in _files(folder):
        for _, result in _lines(path):
            if result.error is None or result.key not in found or found[result.key].error is not None:
                found[result.key] = result
    return list(found.values())


def read_starts(folder: Path) -> list[dict[str, Any]]:
    """The starts of a run, from run.json; empty if there is no such file. InputError: it is damaged."""
    path = Path(folder) / RUN
    if not path.is_file():
        return []
    try:
        return [{**start} for start in schema.read_file(_Run, path).starts]
    except InputError as error:
        raise InputError(f"{error}; delete the file to continue without machines and versions") from error


class Store:
    """Writes to the folder of a run; a context manager. Only one process at a time can open a folder.

    done: key -> error or None, for all results in the folder, including those outside the plan.

    Raises:
        InputError: the folder belongs to another plan (the message says what differs), is in use, or is damaged.
        StoreError: the folder cannot be written.
    """

    def __init__(self, folder: Path, plan: Plan) -> None:
        self.folder, self.plan = Path(folder), plan
        self.done: dict[Key, str | None] = {}
        self._open: dict[str, IO[str]] = {}

    def __enter__(self) -> Store:
        try:
            (self.folder / RESULTS).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreError(f"cannot create the folder {self.folder}: {error}") from error
        self._lock = FileLock(self.folder / LOCK)
        try:
            self._lock.acquire(timeout=0)
        except Timeout:
            raise InputError(f"another process uses {self.folder}; wait for it, or stop it first") from None
        except OSError as error:
            raise StoreError(f"cannot write to {self.folder}: {error}") from error
        try:
            self._take_over()
        except BaseException:
            self._lock.release()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for file in self._open.values():
            with contextlib.suppress(OSError):  # every line has been flushed, or its error is being raised
                file.close()
        self._open = {}
        self._lock.release()

    def add(self, result: Result, worker: str) -> Result:
        """Writes one result and returns it; a result that JSON cannot represent is replaced by one with an error."""
        try:
            line = json.dumps(result.to_dict(), ensure_ascii=False, allow_nan=False) + "\n"
        except (TypeError, ValueError) as error:
            who = {name: getattr(result, name) for name in _WHO}
            result = Result(**who, error=f"the result cannot be written as JSON: {type(error).__name__}: {error}")
            line = json.dumps(result.to_dict(), ensure_ascii=False) + "\n"
        try:
            if worker not in self._open:
                path = self.folder / RESULTS / f"{worker}.jsonl"
                # Lone surrogates are not valid UTF-8; write them as JSON escapes.
                self._open[worker] = path.open("a", encoding="utf8", errors="backslashreplace")
            file = self._open[worker]
            file.write(line)
            file.flush()
            os.fsync(file.fileno())
        except OSError as error:
            raise StoreError(f"cannot write to {self.folder / RESULTS}: {error}") from error
        self.done[result.key] = result.error
        return result

    def add_start(self, workers: int) -> None:
        """Records a start of the run, or its resumption, in run.json."""
        time = datetime.now(UTC).isoformat(timespec="seconds")
        start = {"time": time, "workers": workers, "command": command_line(), "machines": []}
        _write_json(self.folder / RUN, {"starts": [*read_starts(self.folder), start]})

    def add_machine(self, machine: dict[str, Any]) -> None:
        """Records the machine of a worker for this start; equal machines are recorded once."""
        starts = read_starts(self.folder)
        if machine not in starts[-1]["machines"]:
            starts[-1]["machines"].append(machine)
            _write_json(self.folder / RUN, {"starts": starts})

    def _take_over(self) -> None:
        """Checks the plan, removes incomplete last lines, and reads what is done."""
        if _files(self.folder) and not (self.folder / PLAN).exists():
            raise InputError(f"{self.folder} has results but no {PLAN}; use another folder")
        done = {result.key: result.error for result in read_results(self.folder)}
        if (self.folder / PLAN).exists():
            older = read_plan(self.folder)
            conflicts = self.plan.conflicts(older.holding(done)) if done else []  # only results bind a plan
            if conflicts:
                raise InputError(
                    f"{self.folder} holds a run with another plan: {'; '.join(conflicts)}. "
                    "Add to that plan, or use another folder."
                )
        for path in _files(self.folder):
            _cut_torn_line(path)
        self.done = done
        _write_json(self.folder / PLAN, self.plan.to_dict())


def _files(folder: Path) -> list[Path]:
    return sorted((Path(folder) / RESULTS).glob("*.jsonl"))


def _lines(path: Path) -> Iterator[tuple[int, Result]]:
    """(end, result) of every complete line; `end` is its end in the file, in bytes."""
    try:
        data, end = path.read_bytes(), 0
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from error
    for number, raw in enumerate(io.BytesIO(data), 1):
        end += len(raw)
        if not raw.endswith(b"\n"):  # the last line, cut short
            return
        if not raw.strip():
            continue
        if end == len(data) and b"\0" in raw:  # a block that was never written, after a power failure
            return
        try:
            yield end, Result.from_dict(schema.loads(raw))
        except ValueError as error:  # InputError included
            raise InputError(f"{path}, line {number}: {error}; delete the line to run its item again") from error


def _cut_torn_line(path: Path) -> None:
    whole = max((end for end, _ in _lines(path)), default=0)
    if whole < path.stat().st_size:
        os.truncate(path, whole)


def write_whole(path: Path, text: str) -> None:
    """Replaces a file atomically. StoreError: it cannot be written."""
    try:
        files.write_text(path, text)
    except OutputError as error:
        raise StoreError(str(error)) from error


def _write_json(path: Path, data: Any) -> None:
    write_whole(path, json.dumps(data, indent=2, ensure_ascii=False) + "\n")


def command_line(without: Sequence[str] = ()) -> str:
    """The command line of this process; without: options whose values do not matter to a reader, such as "--out"."""
    words, skip = [], False
    for word in sys.argv[1:]:
        if not skip and word.partition("=")[0] not in without:
            words.append(word)
        skip = not skip and word in without  # its value is the next word
    name = Path(sys.argv[0]).name
    return shlex.join(["foveakv" if name == "__main__.py" else name, *words])

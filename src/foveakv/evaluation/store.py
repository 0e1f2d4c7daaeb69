"""A run's folder.

    plan.json               what is to be run
    run.json                every start: when, how many workers, on which machine, with which versions
    results/WORKER.jsonl    one result per line, in the order in which they came

A result counts once its line is on the disk, so that a kill at any moment loses what is being computed and no more. A
last line that was cut short is ignored, and cut off when the run goes on.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from filelock import FileLock, Timeout

from foveakv.errors import InputError, StoreError
from foveakv.evaluation.plan import Key, Plan
from foveakv.evaluation.results import Result
from foveakv.util import files

_WHO = ("task", "item", "seed", "method", "budget", "label", "settings")
PLAN, RUN, RESULTS, LOCK = "plan.json", "run.json", "results", ".lock"


def read_plan(folder: Path) -> Plan:
    """The plan of a run. InputError: there is none, or another version wrote it."""
    path = Path(folder) / PLAN
    if not path.is_file():
        raise InputError(f"{folder} is not the folder of a run: it has no {PLAN}")
    try:
        return Plan.from_dict(_read_json(path))
    except (TypeError, KeyError) as error:
        raise InputError(f"{path} is not a plan of this version: {error!r}") from error


def read_results(folder: Path) -> list[Result]:
    """What a run has so far, each key once. Where there are two, one without an error wins, then the later one."""
    found: dict[Key, Result] = {}
    for path in _files(folder):
        for _, line in _lines(path):
            try:
                result = Result.from_dict(line)
            except (TypeError, AttributeError) as error:
                raise InputError(f"{path} has a line that is no result of this version: {error}") from error
            if result.error is None or result.key not in found or found[result.key].error is not None:
                found[result.key] = result
    return list(found.values())


class Store:
    """A run's folder that is being written to; a context manager. One process at a time may have it open.

    done: key -> error text or None, of all results that are there, those of the plan and those that are left over.

    Raises:
        InputError: the folder belongs to another plan (the message says what differs), is in use, or is damaged.
        StoreError: it cannot be written.
    """

    def __init__(self, folder: Path, plan: Plan) -> None:
        self.folder, self.plan = Path(folder), plan
        self.done: dict[Key, str | None] = {}
        self._open: dict[str, IO[str]] = {}

    def __enter__(self) -> Store:
        try:
            (self.folder / RESULTS).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreError(f"cannot make the folder {self.folder}: {error}") from error
        self._lock = FileLock(self.folder / LOCK)
        try:
            self._lock.acquire(timeout=0)
        except Timeout:
            raise InputError(f"another process is running in {self.folder}; wait for it, or stop it first") from None
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
            with contextlib.suppress(OSError):  # all lines are on the disk, or their error is on its way
                file.close()
        self._open = {}
        self._lock.release()

    def add(self, result: Result, worker: str) -> Result:
        """Writes one result, and returns what is on the disk: what JSON cannot hold becomes an error of its own."""
        try:
            line = json.dumps(result.to_dict(), ensure_ascii=False, allow_nan=False) + "\n"
        except (TypeError, ValueError) as error:
            who = {name: getattr(result, name) for name in _WHO}
            result = Result(**who, error=f"the result cannot be written down: {type(error).__name__}: {error}")
            line = json.dumps(result.to_dict(), ensure_ascii=False) + "\n"
        try:
            if worker not in self._open:
                path = self.folder / RESULTS / f"{worker}.jsonl"
                # What is no text (half a surrogate pair) becomes the escape that JSON has for it.
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
        """Notes in run.json that the run starts, or goes on, now."""
        time = datetime.now(UTC).isoformat(timespec="seconds")
        start = {"time": time, "workers": workers, "command": _command(), "machines": []}
        _write_json(self.folder / RUN, {"starts": [*self._starts(), start]})

    def add_machine(self, machine: dict[str, Any]) -> None:
        """Notes where a worker of this start runs; equal machines are there once."""
        starts = self._starts()
        if machine not in starts[-1]["machines"]:
            starts[-1]["machines"].append(machine)
            _write_json(self.folder / RUN, {"starts": starts})

    def _starts(self) -> list[dict[str, Any]]:
        path = self.folder / RUN
        starts = _read_json(path).get("starts") if path.exists() else []
        if not isinstance(starts, list):
            raise InputError(f"{path} is damaged; delete it to go without machine and versions")
        return starts

    def _take_over(self) -> None:
        """Checks the plan, cuts off what a kill left behind, and reads what is done."""
        if _files(self.folder) and not (self.folder / PLAN).exists():
            raise InputError(f"{self.folder} has results and no {PLAN}; use another folder")
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


def _lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(end, values) of every whole line; `end` is where it ends in the file, in bytes."""
    data, end = path.read_bytes(), 0
    for number, raw in enumerate(data.splitlines(keepends=True), 1):
        end += len(raw)
        last = end == len(data)
        try:
            values = json.loads(raw) if raw.endswith(b"\n") else None
        except ValueError:  # bad JSON, or bytes that are no text
            values = None
        if isinstance(values, dict):
            yield end, values
        elif not last:
            raise InputError(f"{path}, line {number}, is damaged; delete the line, and its item is run again")


def _cut_torn_line(path: Path) -> None:
    whole = max((end for end, _ in _lines(path)), default=0)
    if whole < path.stat().st_size:
        os.truncate(path, whole)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf8"))
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read {path}: {error}") from error
    if not isinstance(data, dict):
        raise InputError(f"{path} is damaged: it is not a table of names and values")
    return data


def write_whole(path: Path, text: str) -> None:
    """The old file or the new one, whatever happens. StoreError: it cannot be written."""
    try:
        files.write_text(path, text)
    except OSError as error:
        raise StoreError(f"cannot write {path}: {error}") from error


def _write_json(path: Path, data: Any) -> None:
    write_whole(path, json.dumps(data, indent=2, ensure_ascii=False) + "\n")


def _command() -> str:
    """What this process was started with."""
    return shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])

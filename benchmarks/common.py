"""Shared by all benchmarks: timing in turns, the machine's description, result files that are written row by row."""

from __future__ import annotations

import datetime
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from foveakv.evaluation import environment
from foveakv.methods import Method

RESULTS = Path(__file__).parent / "results"
SEED = 0


def in_turns(sides: dict[str, Callable[[], Any]], repeats: int, warmup: int = 1) -> dict[str, list[float]]:
    """Seconds of each side, run one after the other `repeats` times, so that noise affects all of them equally."""
    for _ in range(warmup):
        for run in sides.values():
            run()
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(repeats):
        for name, run in sides.items():
            seconds[name].append(clock(run))
    return seconds


def clock(run: Callable[[], Any]) -> float:
    """Seconds of one call."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def spread(seconds: list[float], scale: float = 1e3) -> dict[str, float]:
    """Median, mean, quartiles, range and count, in milliseconds."""
    ordered = [value * scale for value in sorted(seconds)]
    low, middle, high = statistics.quantiles(ordered, n=4, method="inclusive") if len(ordered) > 1 else ordered * 3
    return {
        "median": middle,
        "mean": statistics.fmean(ordered),
        "q1": low,
        "q3": high,
        "low": ordered[0],
        "high": ordered[-1],
        "runs": len(ordered),
    }


def machine(seed: int | None = SEED) -> dict[str, Any]:
    """Versions, processor, threads, load, seed, and the commit that was measured."""
    return {
        **environment.describe(seed=seed),
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "commit": _commit(),
    }


def _commit() -> str | None:
    """Return the commit of this repository, with a + if tracked files differ from it; None outside of a repository."""
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        commit = subprocess.run([*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=True)
        changed = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return commit.stdout.strip() + ("+" if changed.stdout.strip() else "")


class Recorder:
    """A result file, rewritten after every finished group of rows.

    A group is a set of sides that were measured together, in turns: its rows share the fields `by` (e.g. context and
    budget) and the load at that time. With `resume`, groups that are already in the file are not measured again.
    """

    def __init__(
        self,
        name: str,
        by: Iterable[str],
        settings: dict[str, Any],
        *,
        folder: Path = RESULTS,
        label: str = "",
        quick: bool = False,
        resume: bool = False,
    ) -> None:
        self.by = tuple(by)
        self.path = folder / (f"{name}-{label}.json" if label else f"{name}.json")
        self.content: dict[str, Any] = {
            "benchmark": name,
            "command": command(),
            "complete": False,
            "quick": quick,
            "machine": machine(),
            "settings": settings,
            "methods": {},
            "rows": [],
        }
        if resume and self.path.exists():
            self._take(json.loads(self.path.read_text(encoding="utf8")))
        self._save()

    def _take(self, before: dict[str, Any]) -> None:
        """Continue an earlier file. Its rows keep the commit and the load that they were measured with."""
        differing = [key for key in self.content["settings"] if before["settings"].get(key) != self.settings[key]]
        if differing or before["quick"] != self.content["quick"]:
            what = ", ".join(differing) or "quick"
            raise SystemExit(
                f"{self.path} was measured with other settings ({what}). Use the same settings or another --label, or "
                "leave out --resume to start over."
            )
        self.content["rows"], self.content["methods"] = before["rows"], before["methods"]
        self.content["resumed"] = [*before.get("resumed", []), before["machine"]]

    @property
    def settings(self) -> dict[str, Any]:
        return self.content["settings"]

    @property
    def rows(self) -> list[dict[str, Any]]:
        return self.content["rows"]

    def has(self, **group: Any) -> bool:
        """Whether the file already has the rows of this group."""
        return any(all(row[key] == value for key, value in group.items()) for row in self.rows)

    def method(self, label: str, method: Method) -> None:
        """Record the settings of a method under a row's label."""
        self.content["methods"][label] = method.describe()

    def add(self, rows: Iterable[dict[str, Any]]) -> None:
        """Add the rows of a finished group and write the file."""
        when = {
            "load": os.getloadavg()[0],
            "at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        }
        for row in rows:
            missing = [key for key in self.by if key not in row]
            if missing:
                raise ValueError(f"a row lacks {missing}")
            self.rows.append({**row, **when})
        self._save()
        print(".", end="", file=sys.stderr, flush=True)

    def finish(self) -> dict[str, Any]:
        self.content["complete"] = True
        self._save()
        return self.content

    def _save(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.path.with_suffix(".tmp")
        temporary.write_text(json.dumps(self.content, indent=1) + "\n", encoding="utf8")
        os.replace(temporary, self.path)


def write(name: str, made_by: str, rows: list[dict[str, Any]], settings: dict[str, Any]) -> Path:
    """Write a complete result file, for benchmarks that run outside of this command."""
    recorder = Recorder(name, (), settings)
    recorder.content["command"] = made_by
    recorder.add(rows)
    recorder.finish()
    return recorder.path


def command() -> str:
    """The command line that is running, as a reader would type it."""
    return "python -m benchmarks " + " ".join(sys.argv[1:])


def read(folder: Path = RESULTS) -> list[dict[str, Any]]:
    """All result files of a folder, in the order of their names."""
    return [json.loads(path.read_text(encoding="utf8")) for path in sorted(folder.glob("*.json"))]


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)

"""Shared by the sections of the GPU script: the clock, guarded sections and their result file, device timing."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

Section = Callable[["Bench"], Iterator[dict[str, Any]]]


class OutOfTimeError(Exception):
    """Raised when a section has used up its share of the deadline."""


class Bench:
    """Settings, the clock, and the results so far."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.smoke = arguments.smoke
        self.repeats = 2 if self.smoke else arguments.repeats
        self.device = "cpu" if self.smoke else "cuda"
        self.group = 2 if self.smoke else 7  # query heads per KV head; 7 as in Qwen2.5-VL-7B
        self.out = arguments.out
        self.started = time.monotonic()
        self.deadline = arguments.deadline
        self.until = self.started + self.deadline
        self.sections: dict[str, dict[str, Any]] = {}

    def check_time(self) -> None:
        if time.monotonic() > self.until:
            raise OutOfTimeError

    def run(self, name: str, section: Section, share: float) -> None:
        """Collect a section's rows for at most `share` of the remaining time."""
        begun = time.monotonic()
        left = self.started + self.deadline - begun
        self.until = begun + left * share
        rows: list[dict[str, Any]] = []
        record: dict[str, Any] = {"status": "complete", "rows": rows}
        try:
            for row in section(self):
                rows.append(row)
                shown = [f"{key}={_text(value)}" for key, value in row.items() if key != "all"]
                print("  " + "  ".join(shown), flush=True)
                self.check_time()
        except OutOfTimeError:
            record["status"] = "out of time"
        except Exception as error:
            record |= {"status": "failed", "error": repr(error), "traceback": traceback.format_exc()}
            print(record["traceback"], flush=True)
        record["seconds"] = round(time.monotonic() - begun, 1)
        self.sections[name] = record
        print(f"{name}: {record['status']}, {len(rows)} rows, {record['seconds']} s", flush=True)
        self.write()

    def write(self) -> None:
        from foveakv.evaluation import environment

        self.out.parent.mkdir(parents=True, exist_ok=True)
        machine = environment.describe(seed=0)
        machine["versions"]["triton"] = _version("triton")
        machine |= _device()
        content = {
            "benchmark": "gpu",
            "command": "python -m benchmarks.gpu " + " ".join(sys.argv[1:]),
            "machine": machine,
            "smoke": self.smoke,
            "settings": {"repeats": self.repeats, "deadline": self.deadline},
            "sections": self.sections,
        }
        temporary = self.out.with_suffix(".tmp")
        temporary.write_text(json.dumps(content, indent=1) + "\n")
        os.replace(temporary, self.out)


def measure(bench: Bench, sides: dict[str, Callable[[], Any]]) -> dict[str, dict[str, float]]:
    """Device milliseconds of every side, in turns, and the host's microseconds per call.

    The flush in front of a call also keeps the device busy for a few tenths of a millisecond while the host prepares
    the launch, so that the events enclose the device's work alone, save for calls of very many small kernels.
    """
    times: dict[str, list[float]] = {name: [] for name in sides}
    if bench.smoke:
        for _ in range(bench.repeats):
            for name, side in sides.items():
                begun = time.perf_counter()
                side()
                times[name].append((time.perf_counter() - begun) * 1e3)
        return {name: _spread(taken) | {"host_us": 0.0} for name, taken in times.items()}
    import torch

    flush = torch.empty(2**30, dtype=torch.int8, device=bench.device)
    for side in sides.values():
        for _ in range(3):
            side()
    events: dict[str, list[Any]] = {name: [] for name in sides}
    for _ in range(bench.repeats):
        for name, side in sides.items():
            pair = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            flush.zero_()
            pair[0].record()
            side()
            pair[1].record()
            events[name].append(pair)
        torch.cuda.synchronize()
        bench.check_time()
    for name, pairs in events.items():
        times[name] = [begin.elapsed_time(end) for begin, end in pairs]
    return {name: _spread(taken) | {"host_us": _host(sides[name])} for name, taken in times.items()}


def _spread(taken: list[float]) -> dict[str, float]:
    return {"median": statistics.median(taken), "low": min(taken), "high": max(taken)}


def _host(call: Callable[[], Any]) -> float:
    """Microseconds of the host for one call, without waiting for the device."""
    import torch

    torch.cuda.synchronize()
    begun = time.perf_counter()
    for _ in range(20):
        call()
    taken = (time.perf_counter() - begun) / 20 * 1e6
    torch.cuda.synchronize()
    return taken


def _device() -> dict[str, Any]:
    import torch

    if not torch.cuda.is_available():
        return {"cuda": torch.version.cuda}
    properties = torch.cuda.get_device_properties(0)
    return {
        "cuda": torch.version.cuda,
        "capability": f"{properties.major}.{properties.minor}",
        "processors": properties.multi_processor_count,
        "memory_gb": round(properties.total_memory / 1e9, 1),
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _text(value: Any) -> str:
    if isinstance(value, dict):
        host = f", host {value['host_us']:.0f} us" if "host_us" in value else ""
        return f"{value['median']:.4f} ms ({value['low']:.4f}-{value['high']:.4f}{host})"
    return f"{value:.3g}" if isinstance(value, float) else str(value)

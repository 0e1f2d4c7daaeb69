"""What every benchmark shares: timing in turns, the machine's description, JSON files."""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

RESULTS = Path(__file__).parent / "results"


def in_turns(sides: dict[str, Callable[[], Any]], repeats: int, warmup: int = 1) -> dict[str, list[float]]:
    """Seconds of each side, run one after the other `repeats` times, so that a busy moment hits all of them."""
    for _ in range(warmup):
        for run in sides.values():
            run()
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(repeats):
        for name, run in sides.items():
            start = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - start)
    return seconds


def spread(seconds: list[float], scale: float = 1e3) -> dict[str, float]:
    """Median and range in milliseconds."""
    return {
        "median": statistics.median(seconds) * scale,
        "low": min(seconds) * scale,
        "high": max(seconds) * scale,
    }


def machine() -> dict[str, Any]:
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": os.getloadavg()[0],
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())


def write(name: str, command: str, rows: list[dict[str, Any]], settings: dict[str, Any]) -> Path:
    """results/NAME.json, written whole or not at all."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    content = {"benchmark": name, "command": command, "machine": machine(), "settings": settings, "rows": rows}
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(content, indent=1) + "\n")
    os.replace(temporary, path)
    return path

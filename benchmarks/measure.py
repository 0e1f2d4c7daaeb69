"""Run one benchmark, write its result file and show its rows."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import common


def measure(
    name: str, settings: dict[str, Any], *, out: Path, label: str = "", quick: bool, resume: bool
) -> dict[str, Any]:
    """Run `benchmarks.NAME` and return the content of its result file."""
    module = importlib.import_module(f"benchmarks.{name}")
    recorder = common.Recorder(name, module.BY, settings, folder=out, label=label, quick=quick, resume=resume)
    module.run(recorder)
    content = recorder.finish()
    _show(content)
    Console().print(f"written: {recorder.path}")
    return content


def _show(content: dict[str, Any]) -> None:
    rows = content["rows"]
    table = Table(title=content["benchmark"])
    hidden = {"load", "at", *(key for row in rows for key, value in row.items() if isinstance(value, list))}
    columns = [key for key in dict.fromkeys(key for row in rows for key in row) if key not in hidden]
    for column in columns:
        table.add_column(column)
    for row in rows:
        table.add_row(*[_text(row.get(column)) for column in columns])
    Console(width=200).print(table)


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return f"{value['median']:.2f} ({value['low']:.2f}-{value['high']:.2f})"
    if value is None:
        return ""
    return f"{value:.3g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)

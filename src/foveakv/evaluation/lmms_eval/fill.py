"""Fills the "ours" columns of a Markdown page: `python -m foveakv.evaluation.lmms_eval.fill docs/papers.md RESULTS`.

RESULTS has one folder per run, what `--output_path RESULTS/RUN` wrote. A cell says where its figure comes from:

    | 61.7 | <!-- ours RUN TASK/METRIC*100 --> |

TASK/METRIC is a task's metric in lmms-eval's results, or `throughput/NAME`. `*FACTOR` is optional; `+` adds several.
What the cell had behind its mark is replaced. Cells without results stay as they are.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

from foveakv.errors import InputError, OutputError
from foveakv.util import files

_CELL = re.compile(r"<!-- ours (\S+) (\S+) -->[^|\n]*")


def fill(text: str, results: Path) -> tuple[str, int, list[str]]:
    """(the page with figures, how many cells have one, the marks of those without).

    Raises:
        InputError: a mark that cannot be read, or a results file that is no JSON.
    """
    filled, missing = 0, []

    def cell(match: re.Match[str]) -> str:
        nonlocal filled
        mark = match.group(0).split("-->")[0] + "-->"
        value = _value(match.group(1), match.group(2), results)
        if value is None:
            missing.append(f"{match.group(1)} {match.group(2)}")
            return match.group(0)
        filled += 1
        return f"{mark} {value:,.2f} "

    return _CELL.sub(cell, text), filled, missing


def _value(run: str, key: str, results: Path) -> float | None:
    values = [_term(run, term, results) for term in key.split("+")]
    found = [value for value in values if value is not None]
    return sum(found) if len(found) == len(values) else None


def _term(run: str, term: str, results: Path) -> float | None:
    name, _, factor = term.partition("*")
    task, _, metric = name.partition("/")
    try:
        scale = float(factor or 1)
    except ValueError:
        scale = 0.0
    if not task or not metric or not scale:
        raise InputError(f"cannot read {term!r}; write TASK/METRIC or TASK/METRIC*FACTOR")
    for content in _contents(results / run):
        entry = content.get("throughput", {}) if task == "throughput" else content.get("results", {}).get(task, {})
        for key, value in entry.items():
            # lmms-eval's keys are "metric,filter".
            if key.split(",")[0] == metric and isinstance(value, int | float):
                return value * scale
    return None


def _contents(folder: Path) -> list[dict[str, Any]]:
    """Results files of a run, the newest first: their names begin with the date."""
    files = sorted(folder.rglob("*_results.json"), key=lambda file: file.name, reverse=True)
    try:
        return [json.loads(file.read_text(encoding="utf8")) for file in files]
    except ValueError as error:
        raise InputError(f"a results file under {folder} is no JSON: {error}") from error


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m foveakv.evaluation.lmms_eval.fill", description="fill a page's own figures"
    )
    parser.add_argument("page", type=Path, help="Markdown file with `<!-- ours RUN TASK/METRIC -->` marks")
    parser.add_argument("results", type=Path, help="folder with one folder per run")
    options = parser.parse_args(words)
    if not options.results.is_dir():
        parser.error(f"there is no folder {options.results}; run the commands of the page with --output_path first")
    if not options.page.is_file():
        parser.error(f"there is no file {options.page}")
    try:
        text, filled, missing = fill(options.page.read_text(encoding="utf8"), options.results)
        files.write_text(options.page, text)
    except (InputError, OutputError) as error:
        parser.error(str(error))
    print(f"{filled} cells filled, {len(missing)} without results")
    for mark in missing:
        print(f"  {mark}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

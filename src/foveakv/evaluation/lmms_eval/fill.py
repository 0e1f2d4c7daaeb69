"""Fill the measured columns of a Markdown page: `python -m foveakv.evaluation.lmms_eval.fill docs/papers.md RESULTS`.

RESULTS has one folder per run, written by `--output_path RESULTS/RUN`. A mark in a cell says which figure it gets:

    | 61.7 | <!-- ours RUN TASK/METRIC*100 --> |

TASK/METRIC is a metric of a task in lmms-eval's results, or `throughput/NAME`. `*FACTOR` is optional; `+` adds several.
The text after the mark is replaced. Cells without results are not changed.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import Any, TypedDict

from foveakv.errors import InputError, OutputError
from foveakv.evaluation import schema
from foveakv.util import files


class _Results(TypedDict, total=False):
    """The part of lmms-eval's results file that holds figures."""

    results: dict[str, dict[str, Any]]
    throughput: dict[str, Any]


_CELL = re.compile(r"<!-- ours (\S+) (\S+) -->[^|\n]*")


def fill(text: str, results: Path) -> tuple[str, int, list[str]]:
    """(the filled page, the number of filled cells, the marks without results).

    Raises:
        InputError: a mark or a results file cannot be read.
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


def _contents(folder: Path) -> list[_Results]:
    """The results files of a run, newest first (their names start with the date)."""
    files = sorted(folder.rglob("*_results.json"), key=lambda file: file.name, reverse=True)
    return [schema.read_file(_Results, file) for file in files]


def main(words: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m foveakv.evaluation.lmms_eval.fill", description="fill the measured figures of a page"
    )
    parser.add_argument("page", type=Path, help="Markdown file with `<!-- ours RUN TASK/METRIC -->` marks")
    parser.add_argument("results", type=Path, help="folder with one folder per run")
    options = parser.parse_args(words)
    if not options.results.is_dir():
        parser.error(f"{options.results} is not a folder; run the commands of the page with --output_path first")
    if not options.page.is_file():
        parser.error(f"{options.page} is not a file")
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

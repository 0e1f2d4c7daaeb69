"""`python -m benchmarks run decode|memory|prefill [options]`, `... report` (tables) and `... readme` (README.md)."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from benchmarks import common

app = typer.Typer(help=__doc__, no_args_is_help=True)
run = typer.Typer(help="Run one benchmark and write its JSON.", no_args_is_help=True)
app.add_typer(run, name="run")
Contexts = Annotated[list[int], typer.Option("--context", help="Prompt tokens; repeat for several.")]


def _finish(name: str, rows: list[dict[str, Any]], settings: dict[str, Any]) -> None:
    command = "python -m benchmarks " + " ".join(sys.argv[1:])
    path = common.write(name, command, rows, settings)
    _show(name, rows)
    Console().print(f"written: {path}")


@run.command()
def decode(
    geometry: str = "qwen2.5-vl-7b",
    context: Contexts = [8192, 32768],  # noqa: B006
    budget: float = 0.1,
    repeats: int = 15,
    backend: str = "auto",
) -> None:
    """Attention and cache update per layer and token."""
    from benchmarks.decode import run as measure

    rows = measure(geometry, context, budget, repeats, backend)
    _finish("decode", rows, {"geometry": geometry, "budget": budget, "repeats": repeats, "backend": backend})


@run.command()
def memory(
    geometry: str = "qwen2.5-vl-7b",
    context: Contexts = [8192],  # noqa: B006
    budget: Annotated[list[float], typer.Option("--budget")] = [0.1, 0.2],  # noqa: B006
    layers: int = 4,
) -> None:
    """Stored, peak and host bytes."""
    from benchmarks.memory import run as measure

    _finish("memory", measure(geometry, context, budget, layers), {"geometry": geometry, "layers": layers})


@run.command()
def prefill(
    context: Contexts = [2048, 8192],  # noqa: B006
    budget: float = 0.1,
    repeats: int = 3,
    method: Annotated[list[str] | None, typer.Option("--method")] = None,
) -> None:
    """Prefill overhead of every method over the plain model."""
    from benchmarks.prefill import run as measure

    _finish("prefill", measure(context, budget, repeats, method), {"budget": budget, "repeats": repeats})


@app.command()
def report() -> None:
    """Tables of every result file."""
    for path in sorted(common.RESULTS.glob("*.json")):
        content = json.loads(path.read_text())
        Console().print(f"\n{content['command']}   {content['machine']['processor']}", highlight=False)
        _show(content["benchmark"], content["rows"])


@app.command()
def readme() -> None:
    """Writes the README's tables from the result files."""
    from benchmarks.readme import update

    update()


def _show(name: str, rows: list[dict[str, Any]]) -> None:
    table = Table(title=name)
    for column in rows[0]:
        table.add_column(column)
    for row in rows:
        table.add_row(*[_text(value) for value in row.values()])
    Console(width=180).print(table)


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return f"{value['median']:.2f} ({value['low']:.2f}-{value['high']:.2f})"
    return f"{value:.3g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)


if __name__ == "__main__":
    app()

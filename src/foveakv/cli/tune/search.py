"""`foveakv tune --search`: the default, the paper's preset and the best of equally many settings of every method."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.markup import escape

from foveakv.cli import common
from foveakv.errors import InputError
from foveakv.util import files
from foveakv.util.tables import Column, FittedTable

if TYPE_CHECKING:
    from foveakv.cli.tune.request import Request
    from foveakv.evaluation.bootstrap import Interval
    from foveakv.evaluation.search import Found, Search

TRIALS, BUDGETS = 8, (0.05, 0.1, 0.2)


def run(
    request: Request,
    methods: list[str] | None,
    budgets: list[float | int | str] | None,
    trials: int,
    workers: int,
    out: Path | None,
) -> None:
    """Search, and print one table."""
    from foveakv.evaluation import builtin_prompts, grids
    from foveakv.evaluation.search import Search, search_prompts, search_tasks
    from foveakv.evaluation.tasks import find

    search = Search(methods or grids.searchable(), budgets or BUDGETS, trials, request.options, request.seed)
    if request.tasks:
        if out is None or request.data is not None:
            raise InputError("--search with --tasks needs --out, the folder of its runs, and no --data")
        for task in request.tasks:
            find(task)
        from foveakv.cli.eval.display import Display

        common.quiet_transformers()
        items = request.items or builtin_prompts.ITEMS
        with Display() as display:
            found = search_tasks(
                search, request.tasks, items, out, seed=request.seed, workers=workers, progress=display.show,
                model=request.model, **request.loading,
            )  # fmt: skip
        title = f"accuracy on {', '.join(request.tasks)}: {items} new items of each"
    else:
        if out is not None or workers > 1 or request.items is not None:
            raise InputError("--out, --items and --workers belong to --tasks; with --data, results are kept in memory")
        from foveakv.evaluation.trial import Bench

        prompts = request.prompts()
        loaded = request.load()
        with common.messages().status("reading the prompts") as status:
            found = search_prompts(
                search, Bench(loaded, time_every=0), prompts,
                progress=lambda done, total: status.update(f"prompt {done + 1} of {total}"),
            )  # fmt: skip
        title = f"reply tokens equal to the full cache's on {len(prompts)} prompts"
    _print(search, found, title, fresh=bool(request.tasks))
    if request.json is not None:
        files.write_json(request.json, _plain(request, search, found, title))
        common.say_written(request.json)
    if any(one.errors for one in found):
        raise typer.Exit(common.SOME_FAILED)


def _print(search: Search, found: Sequence[Found], title: str, *, fresh: bool) -> None:
    out = common.output()
    table = FittedTable(
        [
            Column("method", right=False), Column("budget"), Column("settings"), Column("default"), Column("paper"),
            Column("best"), Column("default minus best"), Column("within 3 points"),
            Column("best settings", text=True, right=False),
        ],
        title=title,
        caption="percent with 95% intervals over items" + ("" if fresh else "; chosen and shown on the same prompts"),
    )  # fmt: skip
    previous = found[0].method if found else ""
    for one in found:
        if one.method != previous:
            table.end_section()
        previous = one.method
        table.add(
            one.method, str(one.budget), str(one.tried), _text(one.default),
            "-" if one.paper is None else _text(one.paper), _text(one.best), _text(one.gap, signed=True),
            "yes" if one.close else "no", _settings(one.options) or "the default",
            style="" if one.close else "bold",
        )  # fmt: skip
    out.print(table)
    for name, count in search.fewer.items():
        what = "1 setting" if count == 1 else f"{count} settings"
        out.print(f"* {name} has only {what} to try, fewer than {search.trials}", highlight=False)
    for error in dict.fromkeys(error for one in found for error in one.errors):
        out.print(f"[bold red]failed:[/bold red] {escape(error)}", highlight=False, soft_wrap=True)


def _text(found: Interval, *, signed: bool = False) -> str:
    if found.mean != found.mean:  # NaN: nothing ran
        return "-"
    form = "+.1f" if signed else ".1f"
    low_high = f" [{100 * found.low:{form}}, {100 * found.high:{form}}]" if found.known else ""
    return f"{100 * found.mean:{form}}{low_high}"


def _settings(options: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in options.items())


def _plain(request: Request, search: Search, found: Sequence[Found], title: str) -> dict[str, Any]:
    from foveakv.evaluation import environment

    def figure(one: Interval | None) -> dict[str, Any] | None:
        if one is None:
            return None
        return {name: None if value != value else value for name, value in asdict(one).items()}

    return {
        "model": request.model, "tasks": request.tasks, "what": title, "trials": search.trials, "seed": request.seed,
        "environment": environment.describe(), "fewer_settings": search.fewer, "settings": search.settings,
        "methods": [
            {
                "method": one.method, "budget": one.budget, "tried": one.tried, "options": one.options,
                "default": figure(one.default), "paper": figure(one.paper), "best": figure(one.best),
                "default_minus_best": figure(one.gap), "within_3_points": one.close, "errors": list(one.errors),
            }
            for one in found
        ],
    }  # fmt: skip

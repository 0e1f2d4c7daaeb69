"""`foveakv tune`: the smallest budget per method that agrees with the full cache."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import typer
from rich.markup import escape

from foveakv.cli import common
from foveakv.util import files
from foveakv.util.tables import Column, FittedTable

if TYPE_CHECKING:
    from foveakv.cli.tune.request import Request
    from foveakv.evaluation.tune import Tuned


def run(request: Request, max_loss: float, methods: list[str], budgets: list[float | int | str] | None) -> None:
    """Try every method at every budget on the prompts, and print what holds."""
    from foveakv.evaluation.trial import Bench
    from foveakv.evaluation.tune import BUDGETS, FEW, candidates_to_tune, tune

    values = budgets or list(BUDGETS)
    candidates_to_tune(methods, values, request.options, max_loss)  # checks them before the model is loaded
    prompts = request.prompts()
    loaded = request.load()
    with common.messages().status("reading the prompts") as status:
        found = tune(
            Bench(loaded, time_every=0), prompts, methods, budgets=values, options=request.options,
            max_loss=max_loss, seed=request.seed,
            progress=lambda done, total: status.update(f"prompt {done + 1} of {total}"),
        )  # fmt: skip
    _print(found, len(prompts), FEW)
    if request.json is not None:
        files.write_json(request.json, _plain(found, request.model, max_loss, len(prompts)))
        common.say_written(request.json)
    failed = [tuned.method for tuned in found if any(tried.errors for tried in tuned.tried)]
    if failed and not any(tried.loss.n for tuned in found for tried in tuned.tried):
        common.fail(f"every prompt failed with {', '.join(failed)}; the reasons are above")
    if failed:
        raise typer.Exit(common.SOME_FAILED)


def _print(found: Sequence[Tuned], prompts: int, few: int) -> None:
    out = common.output()
    titles = ("budget", "tokens that differ", "upper bound", "stored / full", "host / full", "total / full", "holds")
    table = FittedTable(
        [Column("method", right=False), *map(Column, titles)],
        title=f"agreement with the full cache on {prompts} prompt{'s' if prompts != 1 else ''}",
    )
    for tuned in found:
        for tried in tuned.tried:
            best = tuned.best is tried
            holds = "yes, the smallest" if best else "yes" if tried.holds(tuned.most) else "no"
            table.add(
                tuned.method, str(tried.budget), percent(tried.loss.mean, 2), percent(tried.upper, 2),
                percent(tried.bytes, 1), percent(tried.host, 1), percent(tried.total, 1),
                f"{len(tried.errors)} failed" if tried.errors else holds,
                style="bold" if best else "",
            )  # fmt: skip
        table.end_section()
    out.print(table)
    if prompts < few:
        out.print(
            f"* only {prompts} prompt{'s' if prompts != 1 else ''}: with fewer than {few} the bound is unreliable"
        )
    for tuned in found:
        skipped = max((tried.skipped for tried in tuned.tried), default=0)
        if skipped:
            out.print(f"* {tuned.method} does not apply to {skipped} of the prompts: they have no image")
        for error in dict.fromkeys(error for tried in tuned.tried for error in tried.errors):
            out.print(f"[bold red]failed:[/bold red] {escape(f'{tuned.method}: {error}')}", soft_wrap=True)
    for tuned in found:
        line = tuned.config() or f"# {tuned.method}: no budget keeps the loss within {tuned.most:.2%}"
        if tuned.nothing_judged:
            line = (
                f"# {tuned.method}: no reply has a token to compare, since the first token sees the whole prompt; "
                "use prompts with longer answers"
            )
        elif tuned.too_few:
            line = (
                f"# {tuned.method}: too few tokens. {tuned.tried[0].scored:,} were compared; a bound of "
                f"{tuned.most:.2%} needs at least {math.ceil(3.69 / tuned.most):,} that all agree, from two or more "
                "prompts"
            )
        out.print(line, highlight=False, markup=False, soft_wrap=True)


def percent(share: float, digits: int = 1) -> str:
    """A share as percent; a dash if it is unknown."""
    return "-" if math.isnan(share) else f"{share:.{digits}%}"


def known(value: float) -> float | None:
    """JSON has no NaN."""
    return None if math.isnan(value) else value


def _plain(found: Sequence[Tuned], model: str, max_loss: float, prompts: int) -> dict[str, Any]:
    from foveakv.evaluation import environment

    return {
        "model": model, "max_loss": max_loss, "prompts": prompts, "environment": environment.describe(),
        "methods": [
            {
                "method": tuned.method, "options": tuned.options, "config": tuned.config(),
                "best": None if tuned.best is None else tuned.best.budget,
                "tried": [
                    {
                        "budget": tried.budget, "loss": known(tried.loss.mean), "loss_upper": known(tried.upper),
                        "prompts": tried.loss.n, "bytes_share": known(tried.bytes), "host_share": known(tried.host),
                        "total_share": known(tried.total),
                        "errors": list(tried.errors), "does_not_apply": tried.skipped,
                    }
                    for tried in tuned.tried
                ],
            }
            for tuned in found
        ],
    }  # fmt: skip

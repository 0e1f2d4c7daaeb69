"""`foveakv tune`: find the smallest budget per method that agrees with the full cache on your prompts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from foveakv.cli import common
from foveakv.cli.common import AllowUrlsOption, DebugOption, DeviceOption, DtypeOption, ModelOption, TrustOption
from foveakv.util import files
from foveakv.util.tables import Column, FittedTable

if TYPE_CHECKING:
    from foveakv.evaluation.tune import Tuned


@common.friendly
def tune(
    data: Annotated[Path, typer.Option(help='A folder with prompts.jsonl: {"prompt": "...", "images": ["a.png"]}.')],
    allow_urls: AllowUrlsOption = False,
    model: ModelOption = "demo",
    methods: Annotated[str, typer.Option(help="Methods, separated by commas.")] = "hae,hybridkv,snapkv",
    budgets: Annotated[
        str | None, typer.Option(help="Budgets to try, separated by commas (default: 0.02 to 0.7).")
    ] = None,
    max_loss: Annotated[
        float, typer.Option(help="Largest share of reply tokens that may differ, as an upper bound over the prompts.")
    ] = 0.01,
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", "-n", min=2, help="Maximum length of a reply, in tokens.")
    ] = 64,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="An option as method.key=value. Repeat it for several.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the bootstrap.")] = 0,
    json: Annotated[Path | None, typer.Option("--json", help="Write all figures to this JSON file.")] = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    trust_remote_code: TrustOption = False,
    debug: DebugOption = False,
) -> None:
    """Find the smallest budget per method whose replies agree with the full cache on your own prompts.

    Example: foveakv tune --model demo --data prompts --max-loss 0.01
    """
    from foveakv.cli.settings import parse_budgets, parse_options, split_names
    from foveakv.evaluation.trial import Bench
    from foveakv.evaluation.tune import BUDGETS, FEW, candidates_to_tune, read_prompts
    from foveakv.evaluation.tune import tune as run

    files.check_output_files(json)
    names = split_names(methods, "methods")
    values = parse_budgets(split_names(budgets, "budgets")) if budgets else list(BUDGETS)
    options = parse_options(set_ or [])
    candidates_to_tune(names, values, options, max_loss)  # checks them before the model is loaded
    prompts = read_prompts(data, max_new_tokens, allow_urls=allow_urls)
    loaded = common.load_model(model, device=device, dtype=dtype, trust_remote_code=trust_remote_code)
    with common.messages().status("reading the prompts") as status:
        found = run(
            Bench(loaded, time_every=0), prompts, names, budgets=values, options=options, max_loss=max_loss, seed=seed,
            progress=lambda done, total: status.update(f"prompt {done + 1} of {total}"),
        )  # fmt: skip
    _print(found, len(prompts), FEW)
    if json is not None:
        files.write_json(json, _plain(found, model, max_loss, len(prompts)))
        common.say_written(json)
    failed = [tuned.method for tuned in found if any(tried.errors for tried in tuned.tried)]
    if failed and not any(tried.loss.n for tuned in found for tried in tuned.tried):
        common.fail(f"every prompt failed with {', '.join(failed)}; the reasons are above")
    if failed:
        raise typer.Exit(common.SOME_FAILED)


def _print(found: Sequence[Tuned], prompts: int, few: int) -> None:
    out = common.output()
    titles = ("budget", "tokens that differ", "upper bound", "stored / full", "host / full", "holds")
    table = FittedTable(
        [Column("method", right=False), *map(Column, titles)],
        title=f"agreement with the full cache on {prompts} prompt{'s' if prompts != 1 else ''}",
    )
    for tuned in found:
        for tried in tuned.tried:
            best = tuned.best is tried
            holds = "yes, the smallest" if best else "yes" if tried.holds(tuned.most) else "no"
            table.add(
                tuned.method, str(tried.budget), _percent(tried.loss.mean, 2), _percent(tried.upper, 2),
                _percent(tried.bytes, 1), _percent(tried.host, 1),
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


def _percent(share: float, digits: int) -> str:
    return "-" if math.isnan(share) else f"{share:.{digits}%}"


def _known(value: float) -> float | None:
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
                        "budget": tried.budget, "loss": _known(tried.loss.mean), "loss_upper": _known(tried.upper),
                        "prompts": tried.loss.n, "bytes_share": _known(tried.bytes), "host_share": _known(tried.host),
                        "errors": list(tried.errors), "does_not_apply": tried.skipped,
                    }
                    for tried in tuned.tried
                ],
            }
            for tuned in found
        ],
    }  # fmt: skip

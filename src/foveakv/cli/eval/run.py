"""`foveakv eval run`: evaluate methods on tasks with known answers; a stopped run can be resumed."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from foveakv.cli import common
from foveakv.cli.common import DebugOption, DeviceOption, DtypeOption, ModelOption, TrustOption
from foveakv.cli.eval.display import Display
from foveakv.errors import InputError

if TYPE_CHECKING:
    from foveakv.evaluation.compare import Candidate
    from foveakv.evaluation.plan import Plan
    from foveakv.evaluation.runner import Status

STOPPED = 130
"""Exit code after Ctrl-C, as in shells."""


@common.friendly
def run(
    out: Annotated[Path, typer.Option("--out", "-o", help="The run's folder. The same command again resumes the run.")],
    suite: Annotated[str, typer.Option(help="A set of tasks.")] = "offline",
    tasks: Annotated[str | None, typer.Option(help="Tasks, separated by commas, instead of a suite.")] = None,
    methods: Annotated[
        str, typer.Option(help="Methods, separated by commas. full, and random at every budget, are always added.")
    ] = "hae,hybridkv,snapkv",
    budgets: Annotated[
        str, typer.Option(help="Budgets, separated by commas, for the methods that take one.")
    ] = "0.05,0.1,0.2,0.4",
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="An option as method.key=value. Repeat it for several.")
    ] = None,
    candidate: Annotated[
        list[str] | None,
        typer.Option(
            help="A method under its own label: label=method:key=value,key=value. Without a budget it runs at all "
            "of --budgets. Repeat it for several."
        ),
    ] = None,
    items: Annotated[int, typer.Option(min=1, max=100_000, help="Number of items per task.")] = 200,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the items.")] = 0,
    model: ModelOption = "demo",
    workers: Annotated[int, typer.Option(min=1, help="Number of processes, each with its own copy of the model.")] = 1,
    ray_address: Annotated[
        str | None, typer.Option(help="Address of a Ray cluster for the workers; default: this machine.")
    ] = None,
    time_every: Annotated[
        int, typer.Option(min=0, help="Measure the time per token on every n-th item; 0 measures none.")
    ] = 10,
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="Run failed results again.")] = False,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    trust_remote_code: TrustOption = False,
    debug: DebugOption = False,
) -> None:
    """Evaluate methods on items of tasks and write every result as it comes.

    After a stop or a kill the same command resumes the run. An error is stored with its item and the run continues;
    the exit code is then 1.

    Example: foveakv eval run --tasks cards-4,turns --methods hae,hybridkv --budgets 0.1,0.2 --items 50 --out runs/first
    """
    common.quiet_transformers()
    from foveakv.cli.settings import split_names
    from foveakv.evaluation import runner
    from foveakv.evaluation import tasks as known
    from foveakv.evaluation.plan import Plan, with_baselines
    from foveakv.methods.plugins import loaded_files
    from foveakv.models.loading import check_device

    if ray_address is None:
        check_device(device, dtype)  # the machines of a cluster may have other devices than this one
    chosen = _chosen(methods, budgets, set_ or [], candidate or [])
    names = known.suite(suite) if tasks is None else split_names(tasks, "tasks")
    if not names:
        raise InputError("--tasks is empty; name at least one task, or leave it out")
    plan = Plan.of(
        names, with_baselines(chosen), items, seed=seed, model=model, dtype=dtype, device=device,
        trust_remote_code=trust_remote_code, plugins=loaded_files(), time_every=time_every,
    )  # fmt: skip
    try:
        with Display() as display:
            status = runner.run(
                plan, out, workers=workers, ray_address=ray_address, retry_failed=retry_failed, progress=display.show
            )
    except KeyboardInterrupt:
        common.messages().print(
            f"stopped; the results are in {out}, and the same command resumes the run",
            markup=False, highlight=False, soft_wrap=True,
        )  # fmt: skip
        raise typer.Exit(STOPPED) from None
    _print_end(plan, out, status)
    if status.failed:
        raise typer.Exit(common.SOME_FAILED)


def _chosen(methods: str, budgets: str, assignments: list[str], named: list[str]) -> list[Candidate]:
    """The candidates of `--methods` and `--candidate`: full first, random last."""
    from foveakv.cli.settings import parse_candidate, parse_candidates, split_names

    values = split_names(budgets, "budgets")
    names = split_names(methods, "methods") if methods.strip() else []
    names = ["full", *(name for name in names if name not in ("full", "random")), "random"]
    own = [each for text in named for each in parse_candidate(text, values)]
    found = parse_candidates(names, values, assignments)
    last = [each for each in found if each.method.name == "random"]
    return [*(each for each in found if each not in last), *own, *last]


def _print_end(plan: Plan, folder: Path, status: Status) -> None:
    """Print the number of results, and the errors, the most frequent ones first."""
    from foveakv.evaluation.results import does_not_apply
    from foveakv.evaluation.store import read_results

    out = common.output()
    failed = f", {status.failed} of them failed" if status.failed else ""
    out.print(f"{status.results} results{failed}: {folder}", markup=False, highlight=False, soft_wrap=True)
    if status.skipped:
        out.print(
            f"{status.skipped} do not apply: the method drops visual tokens only, and the item has no image",
            highlight=False, soft_wrap=True,
        )  # fmt: skip
    if not status.failed:
        return
    wanted = set(plan.keys())
    errors = Counter(
        (each.label, each.error)
        for each in read_results(folder)
        if each.error is not None and not does_not_apply(each.error) and each.key in wanted
    )
    for (label, error), count in errors.most_common(10):
        out.print(f"[bold red]{count} x[/bold red] {escape(f'{label}: {error}')}", highlight=False, soft_wrap=True)
    if len(errors) > 10:
        out.print(f"and {len(errors) - 10} other errors", highlight=False)

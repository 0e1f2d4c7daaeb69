"""`foveakv eval run`: methods on tasks with known answers, in a folder that a stopped run goes on with."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from foveakv.cli import common
from foveakv.cli.common import DebugOption, DeviceOption, DtypeOption, ModelOption, TrustOption
from foveakv.cli.eval_report import report
from foveakv.errors import InputError, MethodError

if TYPE_CHECKING:
    from foveakv.evaluation.compare import Candidate
    from foveakv.evaluation.plan import Plan
    from foveakv.evaluation.runner import Status

FAILED = 1
"""Exit code of a run that came to its end with errors in some results."""

STOPPED = 130
"""Exit code after Ctrl-C, as shells have it."""

evaluation = typer.Typer(help="Methods on tasks with known answers, and reports of it.", no_args_is_help=True)


@evaluation.command()
@common.friendly
def run(
    out: Annotated[Path, typer.Option("--out", "-o", help="The run's folder. The same command again goes on with it.")],
    suite: Annotated[str, typer.Option(help="A set of tasks.")] = "offline",
    tasks: Annotated[str | None, typer.Option(help="Tasks, separated by commas, in place of a suite.")] = None,
    methods: Annotated[
        str, typer.Option(help="Methods, separated by commas; full, and random at every budget, are always added.")
    ] = "hae,hybridkv,snapkv",
    budgets: Annotated[
        str, typer.Option(help="Budgets, separated by commas, for the methods that take one.")
    ] = "0.05,0.1,0.2,0.4",
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="A setting as method.key=value; repeat it for more.")
    ] = None,
    candidate: Annotated[
        list[str] | None,
        typer.Option(
            help="A method under a name of its own: label=method:key=value,key=value. Without a budget among them it "
            "runs at every one. Repeat it for more."
        ),
    ] = None,
    items: Annotated[int, typer.Option(min=1, help="Items of every task.")] = 200,
    seed: Annotated[int, typer.Option(min=0, help="Of the items.")] = 0,
    model: ModelOption = "demo",
    workers: Annotated[
        int, typer.Option(min=1, help="Processes that share the work, each with the model; 2 and more need Ray.")
    ] = 1,
    ray_address: Annotated[
        str | None, typer.Option(help="A Ray cluster that the workers run on; without it they run on this machine.")
    ] = None,
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="Run again what gave an error.")] = False,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    trust_remote_code: TrustOption = False,
    debug: DebugOption = False,
) -> None:
    """Run methods on items of tasks and write what comes out, result by result.

    After a stop or a kill the same command goes on where it was. An error is noted with its item and the run goes on;
    the exit code is then 1.

    Example: foveakv eval run --tasks cards-4,turns --methods hae,hybridkv --budgets 0.1,0.2 --items 50 --out runs/first
    """
    common.quiet_transformers()
    from foveakv.cli.settings import split_names
    from foveakv.evaluation import runner
    from foveakv.evaluation import tasks as known
    from foveakv.evaluation.plan import Plan, with_baselines
    from foveakv.methods.plugins import loaded_files

    chosen = _chosen(methods, budgets, set_ or [], candidate or [])
    names = known.suite(suite) if tasks is None else split_names(tasks, "tasks")
    if not names:
        raise InputError("--tasks names no task")
    plan = Plan.of(
        names, with_baselines(chosen), items, seed=seed, model=model, dtype=dtype, device=device,
        trust_remote_code=trust_remote_code, plugins=loaded_files(),
    )  # fmt: skip
    try:
        with _Display() as display:
            status = runner.run(
                plan, out, workers=workers, ray_address=ray_address, retry_failed=retry_failed, progress=display.show
            )
    except KeyboardInterrupt:
        common.messages().print(
            f"stopped; what is done is in {out}, and the same command goes on with it",
            markup=False, highlight=False, soft_wrap=True,
        )  # fmt: skip
        raise typer.Exit(STOPPED) from None
    _print_end(plan, out, status)
    if status.failed:
        raise typer.Exit(FAILED)


def _chosen(methods: str, budgets: str, assignments: list[str], named: list[str]) -> list[Candidate]:
    """The candidates of `--methods` and `--candidate`, full first and random last."""
    from foveakv.cli.settings import parse_candidates, split_names

    values = split_names(budgets, "budgets")
    names = split_names(methods, "methods") if methods.strip() else []
    names = ["full", *(name for name in names if name not in ("full", "random")), "random"]
    own = [each for text in named for each in parse_candidate(text, values)]
    found = parse_candidates(names, values, assignments)
    last = [each for each in found if each.method.name == "random"]
    return [*(each for each in found if each not in last), *own, *last]


def parse_candidate(text: str, budgets: Sequence[str] = ()) -> list[Candidate]:
    """ "label=method:key=value,key=value" as one candidate, or as one per budget where it names none."""
    from foveakv.cli.settings import parse_candidates

    label, equals, rest = (part.strip() for part in text.partition("="))
    name, _, settings = (part.strip() for part in rest.partition(":"))
    if not equals or not label or not name or ":" in label:
        raise MethodError(f"--candidate {text!r} is not of the form label=method:key=value,key=value")
    own = [f"{name}.{setting.strip()}" for setting in settings.split(",") if setting.strip()]
    try:
        found = parse_candidates([name], list(budgets), own)
    except MethodError as error:
        raise MethodError(f"--candidate {label}: {error}") from error
    return [replace(each, label=label + each.label.removeprefix(name)) for each in found]


class _Display:
    """A bar on a terminal; in a file or pipe a line now and then."""

    EVERY = 60.0
    """Seconds between two lines."""

    def __init__(self) -> None:
        self.console = common.messages()
        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("results, {task.fields[items]}"),
            TextColumn("[red]{task.fields[errors]}"),
            TimeElapsedColumn(),
            TextColumn("left:"),
            TimeRemainingColumn(),
            console=self.console,
            speed_estimate_period=1800,  # an item may take minutes
            transient=True,
            disable=not self.console.is_terminal,
        )
        self.first: tuple[float, int] | None = None
        self.last = 0.0

    def __enter__(self) -> _Display:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self.bar.live.is_started:
            self.bar.stop()

    def show(self, status: Status) -> None:
        if not self.console.is_terminal:
            self._line(status)
            return
        items, errors = _items(status), _errors(status)
        if self.first is None:
            # Not started before: the embedded model draws its own bar when it is put together for the first time.
            self.first = (time.monotonic(), status.results)
            self.console.print("loading the model" if status.results < status.total else "nothing to do")
            self.task = self.bar.add_task(
                "running", total=status.total, completed=status.results, items=items, errors=errors
            )
            return
        self.bar.start()
        self.bar.update(self.task, completed=status.results, items=items, errors=errors)

    def _line(self, status: Status) -> None:
        now = time.monotonic()
        if self.first is None:
            self.first = (now, status.results)
        elif now - self.last < self.EVERY:
            return
        self.last = now
        words = [f"{status.results} of {status.total} results", _items(status), _errors(status)]
        made = status.results - self.first[1]
        if made:
            left = (status.total - status.results) * (now - self.first[0]) / made
            words.append(f"about {_duration(left)} left")
        self.console.print(", ".join(word for word in words if word), markup=False, highlight=False, soft_wrap=True)


def _items(status: Status) -> str:
    return f"{status.items} of {status.total_items} items"


def _errors(status: Status) -> str:
    return f"{status.failed} failed" if status.failed else ""


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _print_end(plan: Plan, folder: Path, status: Status) -> None:
    """What there is now, and the errors, the most frequent first."""
    from foveakv.evaluation.results import does_not_apply
    from foveakv.evaluation.store import read_results

    out = common.output()
    failed = f", {status.failed} of them failed" if status.failed else ""
    out.print(f"{status.results} results{failed}: {folder}", markup=False, highlight=False, soft_wrap=True)
    if status.skipped:
        out.print(
            f"{status.skipped} do not apply: the method drops visual tokens only, and the item has no picture",
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


evaluation.command()(report)

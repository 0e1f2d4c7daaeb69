"""Runs a plan: in this process, or on several workers through Ray. What is done stays done, whatever happens.

`run(plan, folder)` does what is missing in the folder; the same call again goes on where the last one stopped. Only the
process that calls `run` writes.
"""

from __future__ import annotations

import importlib
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from foveakv.errors import InputError
from foveakv.evaluation import items
from foveakv.evaluation.plan import Entry, Plan, Unit
from foveakv.evaluation.results import Result, describe_error, does_not_apply
from foveakv.evaluation.store import Store


class Bench(Protocol):
    """What the runner needs of `foveakv.evaluation.trial.Bench`."""

    def run(self, item: Any, candidates: Sequence[Any], /) -> Iterator[Result]: ...


Factory = Callable[[Plan], Bench]
"""Makes a worker's bench. With several workers it must be importable by its name there."""


@dataclass(frozen=True)
class Status:
    """How far a run is. results, items: done, of how many; an item is one question with all methods.

    failed: results with an error; skipped: those whose error says that the method does not apply (`does_not_apply`).
    """

    results: int
    total: int
    items: int
    total_items: int
    failed: int
    skipped: int = 0


def load_bench(plan: Plan) -> Bench:
    """The model of the plan, and the bench that runs methods on it."""
    import transformers

    from foveakv import models
    from foveakv.evaluation import trial

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    options: dict[str, Any] = {"trust_remote_code": True} if plan.trust_remote_code else {}
    return trial.Bench(models.load(plan.model, dtype=plan.dtype, device=plan.device, **options))


def run(
    plan: Plan,
    folder: Path,
    *,
    workers: int = 1,
    ray_address: str | None = None,
    retry_failed: bool = False,
    progress: Callable[[Status], None] | None = None,
    factory: Factory = load_bench,
) -> Status:
    """Does all of the plan that is missing in the folder.

    Args:
        plan: what is to be done; it may add items, tasks and methods to the plan that the folder was made with.
        folder: where results go, see `foveakv.evaluation.store`.
        workers: processes, each with its own copy of the model and cores // workers threads. One worker is this
            process, without Ray.
        ray_address: a Ray cluster that the workers run on ("auto", "host:6379", "ray://host:10001"); without it
            several workers are processes of this machine.
        retry_failed: run again what gave an error.
        progress: called once before the work and after every result.
        factory: makes a worker's bench.

    Returns:
        The status at the end. What raised while it ran is a result with `error`, and counts as `failed`.

    Raises:
        InputError, StoreError: see `Store`. ModelLoadError and others: the model does not load.
        MissingDependencyError: several workers, and Ray is not installed.
    """
    if workers < 1:
        raise InputError(f"there is at least one worker, not {workers}")
    for task in plan.tasks:
        items.find(task)
    with Store(folder, plan) as store:
        finished = {
            key for key, error in store.done.items() if not retry_failed or error is None or does_not_apply(error)
        }
        units = plan.units(finished)
        tally = _Tally(plan, store, units)
        if progress is not None:
            progress(tally.status())
        if not units:
            return tally.status()
        store.add_start(workers)
        if workers == 1 and ray_address is None:
            source = here(plan, units, factory, store.add_machine)
        else:
            from foveakv.evaluation.ray_pool import over_ray  # Ray is imported where it is used

            source = over_ray(plan, units, factory, store.add_machine, workers, ray_address)
        for worker, result in source:
            tally.add(store.add(result, worker))
            if progress is not None:
                progress(tally.status())
        return tally.status()


def here(
    plan: Plan, units: Sequence[Unit], factory: Factory, ready: Callable[[dict[str, Any]], None]
) -> Iterator[tuple[str, Result]]:
    """(worker's name, result), as they come, from this process."""
    worker = Worker(plan, factory)
    ready(worker.load())
    for unit in units:
        for result in worker.run(unit):
            yield worker_name(0), result


def worker_name(number: int) -> str:
    """The name of a worker's file of results."""
    return f"worker-{number}"


class Worker:
    """Has a bench and runs units on it. With `threads` it must be made before the process imports torch."""

    def __init__(self, plan: Plan, factory: Factory, threads: int | None = None) -> None:
        self.plan, self.factory, self.threads = plan, factory, threads
        self.candidates: dict[str, Any] = {}

    def load(self) -> dict[str, Any]:
        """Makes the bench; says on what machine and with which versions it runs."""
        if self.threads is not None:
            for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
                os.environ[name] = str(self.threads)
            os.environ.setdefault("GOMP_SPINCOUNT", "2000")  # as for the command line, see cli/app.py
            importlib.import_module("torch").set_num_threads(self.threads)
        from foveakv.evaluation import environment
        from foveakv.methods.plugins import load_file

        for file in self.plan.plugins:
            load_file(file)
        self.bench = self.factory(self.plan)
        self.candidates = {entry.label: entry.candidate() for entry in self.plan.entries}
        return environment.describe(getattr(getattr(self.bench, "loaded", None), "model", None))

    def run(self, unit: Unit) -> Iterator[Result]:
        """A result for every label of the unit, whatever raises on the way."""
        missing = list(unit.labels)
        error = "the bench gave no result"
        try:
            item = items.find(unit.task).item(unit.number, unit.seed)
            for result in self.bench.run(item, [self.candidates[label] for label in unit.labels]):
                if result.label in missing:
                    missing.remove(result.label)
                    yield result
        except Exception as failure:  # one item's failure, whatever it is, does not end a run of hours
            error = describe_error(failure)
        yield from failures(self.plan, unit, missing, error)


def failures(plan: Plan, unit: Unit, labels: Sequence[str], error: str) -> Iterator[Result]:
    """Results that say why there are none."""
    for entry in map(plan.entry, labels):
        yield _failure(unit, entry, error)


def _failure(unit: Unit, entry: Entry, error: str) -> Result:
    return Result(
        task=unit.task,
        item=unit.number,
        seed=unit.seed,
        method=entry.method,
        budget=entry.settings.get("budget"),
        label=entry.label,
        settings={"method": entry.method, **entry.settings},
        error=error,
    )


class _Tally:
    """Counts what is done, of the plan alone."""

    def __init__(self, plan: Plan, store: Store, units: Sequence[Unit]) -> None:
        self.missing = Counter({(unit.task, unit.number): len(unit.labels) for unit in units})
        wanted = set(plan.keys())
        self.total, self.total_items = len(wanted), len(plan.units())
        again = {(unit.task, unit.number, unit.seed, label) for unit in units for label in unit.labels}
        errors = {key: error for key in wanted - again if (error := store.done.get(key)) is not None}
        self.skipped = sum(map(does_not_apply, errors.values()))
        self.failed = len(errors) - self.skipped

    def add(self, result: Result) -> None:
        place = (result.task, result.item)
        self.missing[place] -= 1
        if not self.missing[place]:
            del self.missing[place]
        if does_not_apply(result.error):
            self.skipped += 1
        elif result.error is not None:
            self.failed += 1

    def status(self) -> Status:
        return Status(
            results=self.total - sum(self.missing.values()),
            total=self.total,
            items=self.total_items - len(self.missing),
            total_items=self.total_items,
            failed=self.failed,
            skipped=self.skipped,
        )

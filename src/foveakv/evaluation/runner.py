"""Runs a plan, in this process or on several workers through Ray.

`run(plan, folder)` computes the results that the folder lacks, so calling it again resumes a stopped run. Only the
process that calls `run` writes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from foveakv.errors import InputError
from foveakv.evaluation import local_pool, ray_pool, tasks
from foveakv.evaluation.plan import Plan, Unit
from foveakv.evaluation.results import Result, does_not_apply
from foveakv.evaluation.store import Store
from foveakv.evaluation.worker import Factory, Worker, load_bench, worker_name


@dataclass(frozen=True)
class Status:
    """Progress of a run. results, items: done, of `total` and `total_items`; an item is one question with all methods.

    failed: results with an error; skipped: results whose error says that the method does not apply (`does_not_apply`).
    """

    results: int
    total: int
    items: int
    total_items: int
    failed: int
    skipped: int = 0


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
    """Computes all results of the plan that the folder does not have.

    Args:
        plan: what to run; it may add items, tasks and methods to the plan that the folder was made with.
        folder: of the run, see `foveakv.evaluation.store`.
        workers: number of processes, each with its own copy of the model and cores // workers threads. One worker runs
            in this process. Several are Ray's, or plain processes of this machine where Ray is not installed.
        ray_address: a Ray cluster for the workers ("auto", "host:6379", "ray://host:10001"); without it, several
            workers are processes on this machine.
        retry_failed: also recompute results that have an error.
        progress: called once before the work and after every result.
        factory: makes a worker's bench.

    Returns:
        The status at the end. An exception inside an item becomes a result with `error`, and counts as `failed`.

    Raises:
        InputError, StoreError: see `Store`. ModelLoadError and others: the model does not load.
        MissingDependencyError: `ray_address` is given, and Ray is not installed.
    """
    if workers < 1:
        raise InputError(f"workers must be at least 1, got {workers}")
    for task in plan.tasks:
        tasks.find(task)
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
            source = run_units(plan, units, factory, store.add_machine)
        elif ray_address is None and find_spec("ray") is None:
            source = local_pool.run_units(plan, units, factory, store.add_machine, workers)
        else:
            source = ray_pool.run_units(plan, units, factory, store.add_machine, workers, ray_address)
        for worker, result in source:
            tally.add(store.add(result, worker))
            if progress is not None:
                progress(tally.status())
        return tally.status()


def run_units(
    plan: Plan, units: Sequence[Unit], factory: Factory, ready: Callable[[dict[str, Any]], None]
) -> Iterator[tuple[str, Result]]:
    """(worker's name, result) for every result of the units, computed in this process."""
    worker = Worker(plan, factory)
    ready(worker.load())
    for unit in units:
        for result in worker.run(unit):
            yield worker_name(0), result


class _Tally:
    """Counts the finished results of the plan."""

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

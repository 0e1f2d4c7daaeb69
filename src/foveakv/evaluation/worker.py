"""A worker of a run: it loads the model once and runs units of work on it."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from foveakv.evaluation.plan import Entry, Plan, Unit
from foveakv.evaluation.results import Result, describe_error


class Bench(Protocol):
    """The part of `foveakv.evaluation.trial.Bench` that a worker uses."""

    def run(self, item: Any, candidates: Sequence[Any], /) -> Iterator[Result]:
        """One result per candidate."""
        ...


Factory = Callable[[Plan], Bench]
"""Makes a worker's bench. With several workers it must be importable by name in their processes."""


def load_bench(plan: Plan) -> Bench:
    """Loads the plan's model, and returns a bench for it. ModelLoadError: the model does not load."""
    import transformers

    from foveakv import models
    from foveakv.evaluation import trial

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    options: dict[str, Any] = {"trust_remote_code": True} if plan.trust_remote_code else {}
    loaded = models.load(plan.model, dtype=plan.dtype, device=plan.device, **options)
    return trial.Bench(loaded, time_every=plan.time_every)


class Worker:
    """Owns a bench and runs units on it.

    Args:
        plan: the run's plan.
        factory: makes the bench.
        threads: CPU threads of torch. If set, the worker must be made before the process imports torch.
    """

    def __init__(self, plan: Plan, factory: Factory, threads: int | None = None) -> None:
        self.plan, self.factory, self.threads = plan, factory, threads
        self.candidates: dict[str, Any] = {}

    def load(self) -> dict[str, Any]:
        """Makes the bench; returns the machine and versions that it runs with."""
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
        """A result for every label of the unit; what raises becomes a result with `error`."""
        from foveakv.evaluation import tasks

        missing = list(unit.labels)
        error = "the bench gave no result"
        try:
            item = tasks.find(unit.task).item(unit.number, unit.seed)
            for result in self.bench.run(item, [self.candidates[label] for label in unit.labels]):
                if result.label in missing:
                    missing.remove(result.label)
                    yield result
        except Exception as failure:  # one item's failure, whatever it is, does not end a run of hours
            error = describe_error(failure)
        yield from failures(self.plan, unit, missing, error)


def worker_name(number: int) -> str:
    """The name of a worker's results file."""
    return f"worker-{number}"


def failures(plan: Plan, unit: Unit, labels: Sequence[str], error: str) -> Iterator[Result]:
    """A result with this error for each label."""
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

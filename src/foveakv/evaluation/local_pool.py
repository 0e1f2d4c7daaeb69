"""Runs the units of a plan in several processes of this machine, where Ray is not installed.

Each process loads its own copy of the model and has an equal share of the cores. A process that dies ends the run; the
same call resumes it.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from foveakv.errors import InputError
from foveakv.evaluation.plan import Plan, Unit
from foveakv.evaluation.results import Result
from foveakv.evaluation.worker import Factory, Worker, worker_name

_own: list[tuple[Worker, dict[str, Any]]] = []
"""In a worker process: the worker that was loaded with the first unit, and its machine."""


def run_units(
    plan: Plan, units: Sequence[Unit], factory: Factory, ready: Callable[[dict[str, Any]], None], workers: int
) -> Iterator[tuple[str, Result]]:
    """(worker's name, result) for every result of the units; `ready` gets the machine of every worker.

    Raises:
        InputError: a process died. What loading the model raises.
    """
    threads = max(1, (os.cpu_count() or 1) // workers)
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"))
    names: dict[int, str] = {}
    try:
        for done in as_completed([pool.submit(_run, plan, factory, threads, unit) for unit in units]):
            process, machine, results = done.result()
            if process not in names:
                names[process] = worker_name(len(names))
                ready(machine)
            for result in results:
                yield names[process], result
    except BrokenProcessPool as error:
        raise InputError(
            "a worker process died, probably for lack of memory; the same command resumes the run (with fewer workers "
            "if it dies again)"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _run(plan: Plan, factory: Factory, threads: int, unit: Unit) -> tuple[int, dict[str, Any], list[Result]]:
    """In a worker process: (process id, machine, the results of the unit)."""
    if not _own:
        worker = Worker(plan, factory, threads)
        _own.append((worker, worker.load()))
    worker, machine = _own[0]
    return os.getpid(), machine, list(worker.run(unit))

"""Several workers through Ray: processes on this machine or on a cluster. Results are returned to the caller."""

from __future__ import annotations

import contextlib
import logging
import os
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

from foveakv.errors import FoveaKVError, InputError, MissingDependencyError
from foveakv.evaluation.plan import Plan, Unit
from foveakv.evaluation.results import Result
from foveakv.evaluation.worker import Factory, Worker, failures, worker_name

LOG = logging.getLogger(__name__)

DEATHS = 2
"""The number of times that an item may kill its worker, or workers in a row may die while loading, before an error."""

PATIENCE = 120.0
"""Seconds without a ready worker after which a warning is logged."""


def run_units(
    plan: Plan,
    units: Sequence[Unit],
    factory: Factory,
    ready: Callable[[dict[str, Any]], None],
    workers: int,
    address: str | None,
) -> Iterator[tuple[str, Result]]:
    """(worker's name, result) for every result of the units.

    A worker that dies is replaced and its unit is run again; after `DEATHS` times the unit's results are errors.

    Args:
        plan, units: what to run.
        factory: makes a worker's bench.
        ready: called with the description of each worker's machine.
        workers: number of workers, at most one per unit.
        address: of a Ray cluster; None starts Ray on this machine.

    Raises:
        InputError: no cluster at the address, or a device with an index. FoveaKVError: workers die while loading.
        MissingDependencyError: Ray is not installed.
    """
    ray = _import_ray()
    if plan.device is not None and ":" in plan.device:
        raise InputError(f"with Ray every worker gets its own device; pass {plan.device.split(':')[0]} as the device")
    workers = min(workers, len(units))
    connected = _connect(ray, workers, address)
    try:
        yield from _Pool(ray, plan, units, factory, workers).results(ready)
    finally:
        if connected:
            ray.shutdown()


def share(cpus: float, gpus: float, workers: int, device: str | None) -> dict[str, Any]:
    """The threads of a worker, and the resources to request from Ray: an equal share of the cores and GPUs."""
    threads = max(1, int(cpus // workers))
    asked = {"num_cpus": threads if cpus >= workers else max(0.01, int(100 * cpus / workers) / 100)}
    if gpus and device != "cpu":
        part = gpus / workers
        asked["num_gpus"] = 1 if part >= 1 else int(100 * part) / 100
    return {"threads": threads, "asked": asked}


def _import_ray() -> ModuleType:
    # Disable Ray's usage reports unless the user enabled them.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ImportError as error:
        raise MissingDependencyError("several workers need Ray: pip install 'foveakv[eval]'") from error
    return ray


def _connect(ray: ModuleType, workers: int, address: str | None) -> bool:
    """Connects to Ray. True if this call made the connection, so that the caller must shut it down."""
    if ray.is_initialized():
        return False
    if address is not None:
        try:
            ray.init(address=address, log_to_driver=False, logging_level=logging.WARNING)
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise InputError(f"no Ray cluster answers at {address}: {error}") from error
        return True
    logging.getLogger("ray").setLevel(logging.ERROR)  # Ray warns about authentication between its own processes
    ray.init(
        address="local",  # never an existing cluster on this machine
        num_cpus=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        include_dashboard=False,
        object_store_memory=100 * 2**20,  # results are small
        log_to_driver=False,
        logging_level=logging.ERROR,
    )
    return True


class _Pool:
    """The workers, the unit that each is running, and the units that are left."""

    def __init__(self, ray: ModuleType, plan: Plan, units: Sequence[Unit], factory: Factory, workers: int) -> None:
        self.ray, self.plan, self.factory, self.workers = ray, plan, factory, workers
        self.left = deque(units)
        self.actors: dict[int, Any] = {}
        self.busy: dict[Any, tuple[int, Unit | None]] = {}  # a pending call -> (worker, its unit; None: it is loading)
        self.deaths: Counter[Unit | None] = Counter()
        found = ray.cluster_resources()
        self.share = share(found.get("CPU", 1), found.get("GPU", 0), workers, plan.device)

    def results(self, ready: Callable[[dict[str, Any]], None]) -> Iterator[tuple[str, Result]]:
        """See `run_units`."""
        for number in range(self.workers):
            self._start(number)
        try:
            # Do not wait for workers that are still loading or waiting for resources.
            while self.left or any(unit is not None for _, unit in self.busy.values()):
                done = self._wait()
                number, unit = self.busy.pop(done)
                try:
                    value = self.ray.get(done)
                except self.ray.exceptions.RayTaskError as error:  # `load` raised
                    cause = error.cause
                    raise (cause if isinstance(cause, FoveaKVError) else error) from None
                except self.ray.exceptions.RayError as error:
                    yield from self._died(number, unit, error)
                    continue
                if unit is None:
                    self.deaths[None] = 0
                    ready(value)
                else:
                    for result in value:
                        yield worker_name(number), result
                if self.left:
                    self._give(number, self.left.popleft())
        finally:
            for actor in self.actors.values():
                with contextlib.suppress(Exception):  # it may be dead
                    self.ray.kill(actor)

    def _wait(self) -> Any:
        """The next call that has finished."""
        while True:
            done, _ = self.ray.wait(list(self.busy), num_returns=1, timeout=PATIENCE)
            if done:
                return done[0]
            if all(unit is None for _, unit in self.busy.values()):
                LOG.warning("no worker is ready yet; each waits for a node with %s free", self.share["asked"])

    def _start(self, number: int) -> None:
        # Restarted by `_died`, not by Ray, since only `_died` knows the unit.
        remote = self.ray.remote(_RayWorker).options(**self.share["asked"], max_restarts=0)
        self.actors[number] = remote.remote(self.plan, self.factory, self.share["threads"])
        self.busy[self.actors[number].load.remote()] = (number, None)

    def _give(self, number: int, unit: Unit) -> None:
        self.busy[self.actors[number].run.remote(unit)] = (number, unit)

    def _died(self, number: int, unit: Unit | None, error: Exception) -> Iterator[tuple[str, Result]]:
        self.deaths[unit] += 1
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        LOG.warning("%s died and is restarted: %s", worker_name(number), reason)
        if unit is None:
            if self.deaths[unit] >= DEATHS:
                raise FoveaKVError(f"workers die while loading the model; is there enough memory? {reason}")
        elif self.deaths[unit] >= DEATHS:
            text = f"the worker died {DEATHS} times while running this item: {reason}"
            for result in failures(self.plan, unit, unit.labels, text):
                yield worker_name(number), result
        else:
            self.left.appendleft(unit)
        if self.left:
            self._start(number)


class _RayWorker(Worker):
    """A worker whose `run` returns a list, which Ray can send."""

    def run(self, unit: Unit) -> list[Result]:  # type: ignore[override]
        return list(super().run(unit))

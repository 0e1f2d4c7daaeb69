"""Several workers through Ray: processes of this machine, or of a cluster. Results come back to the caller."""

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
from foveakv.evaluation.runner import Factory, Worker, failures, worker_name

LOG = logging.getLogger(__name__)

DEATHS = 2
"""How often an item may take its worker down, and workers in a row may die while they load, before it is an error."""

PATIENCE = 120.0
"""Seconds without a first worker after which the user is told."""


def over_ray(
    plan: Plan,
    units: Sequence[Unit],
    factory: Factory,
    ready: Callable[[dict[str, Any]], None],
    workers: int,
    address: str | None,
) -> Iterator[tuple[str, Result]]:
    """(worker's name, result), a unit's at a time. A worker that dies is replaced, and its unit is run again."""
    ray = _import_ray()
    if plan.device is not None and ":" in plan.device:
        raise InputError(f"with Ray every worker gets its own device: give {plan.device.split(':')[0]} as the device")
    workers = min(workers, len(units))
    connected = _connect(ray, workers, address)
    try:
        yield from _Pool(ray, plan, units, factory, workers).results(ready)
    finally:
        if connected:
            ray.shutdown()


def share(cpus: float, gpus: float, workers: int, device: str | None) -> dict[str, Any]:
    """Threads of a worker, and what to ask Ray for: cores // workers, and an equal part of the GPUs."""
    threads = max(1, int(cpus // workers))
    asked = {"num_cpus": threads if cpus >= workers else max(0.01, int(100 * cpus / workers) / 100)}
    if gpus and device != "cpu":
        part = gpus / workers
        asked["num_gpus"] = 1 if part >= 1 else int(100 * part) / 100
    return {"threads": threads, "asked": asked}


def _import_ray() -> ModuleType:
    # Ray's report of usage to its makers is off, unless the user turned it on.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ImportError as error:
        raise MissingDependencyError("several workers need Ray: pip install 'foveakv[eval]'") from error
    return ray


def _connect(ray: ModuleType, workers: int, address: str | None) -> bool:
    """Whether this call made the connection, and has to end it."""
    if ray.is_initialized():
        return False
    if address is not None:
        try:
            ray.init(address=address, log_to_driver=False, logging_level=logging.WARNING)
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise InputError(f"no Ray cluster answers at {address}: {error}") from error
        return True
    logging.getLogger("ray").setLevel(logging.ERROR)  # it warns of how its own processes trust each other
    ray.init(
        address="local",  # never a cluster that happens to run here
        num_cpus=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        include_dashboard=False,
        object_store_memory=100 * 2**20,  # results are small
        log_to_driver=False,
        logging_level=logging.ERROR,
    )
    return True


class _Pool:
    """The workers, what each is doing, and what is left to do."""

    def __init__(self, ray: ModuleType, plan: Plan, units: Sequence[Unit], factory: Factory, workers: int) -> None:
        self.ray, self.plan, self.factory, self.workers = ray, plan, factory, workers
        self.left = deque(units)
        self.actors: dict[int, Any] = {}
        self.busy: dict[Any, tuple[int, Unit | None]] = {}  # what a worker was asked -> (its number, None: to load)
        self.deaths: Counter[Unit | None] = Counter()
        found = ray.cluster_resources()
        self.share = share(found.get("CPU", 1), found.get("GPU", 0), workers, plan.device)

    def results(self, ready: Callable[[dict[str, Any]], None]) -> Iterator[tuple[str, Result]]:
        for number in range(self.workers):
            self._start(number)
        try:
            # Workers that are still loading, or find no free machine, are not waited for.
            while self.left or any(unit is not None for _, unit in self.busy.values()):
                done = self._wait()
                number, unit = self.busy.pop(done)
                try:
                    value = self.ray.get(done)
                except self.ray.exceptions.RayTaskError as error:  # our own code raised, in `load`
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
        """What is done next."""
        while True:
            done, _ = self.ray.wait(list(self.busy), num_returns=1, timeout=PATIENCE)
            if done:
                return done[0]
            if all(unit is None for _, unit in self.busy.values()):
                LOG.warning("no worker is ready yet; each waits for a machine with %s free", self.share["asked"])

    def _start(self, number: int) -> None:
        # Not restarted by Ray, but by `_died`, which knows what the worker was doing.
        remote = self.ray.remote(_RayWorker).options(**self.share["asked"], max_restarts=0)
        self.actors[number] = remote.remote(self.plan, self.factory, self.share["threads"])
        self.busy[self.actors[number].load.remote()] = (number, None)

    def _give(self, number: int, unit: Unit) -> None:
        self.busy[self.actors[number].run.remote(unit)] = (number, unit)

    def _died(self, number: int, unit: Unit | None, error: Exception) -> Iterator[tuple[str, Result]]:
        self.deaths[unit] += 1
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        LOG.warning("%s died and is started again: %s", worker_name(number), reason)
        if unit is None:
            if self.deaths[unit] >= DEATHS:
                raise FoveaKVError(f"workers die while they load the model; is there enough memory? {reason}")
        elif self.deaths[unit] >= DEATHS:
            text = f"the worker died {DEATHS} times while it ran this item: {reason}"
            for result in failures(self.plan, unit, unit.labels, text):
                yield worker_name(number), result
        else:
            self.left.appendleft(unit)
        if self.left:
            self._start(number)


class _RayWorker(Worker):
    """Ray sends back a list, not an iterator."""

    def run(self, unit: Unit) -> list[Result]:  # type: ignore[override]
        return list(super().run(unit))

"""Requests that wait and requests that run, and when one may begin. Used by any thread."""

from __future__ import annotations

import threading
import time

from foveakv.serving.engine import Status
from foveakv.serving.errors import internal, overloaded
from foveakv.serving.job import Job
from foveakv.serving.limits import Limits


class Roster:
    """First come, first served: a request begins when it is the oldest and its bytes and answers fit.

    No younger request overtakes it, so that a large one is never starved; what is bounded is the number that wait.
    """

    def __init__(self, limits: Limits, kv_bytes: int) -> None:
        self.limits = limits
        self.kv_bytes = kv_bytes
        self.closed = False
        self._changed = threading.Condition()
        self._waiting: list[Job] = []
        self._running: list[Job] = []

    def add(self, job: Job, alive: bool) -> None:
        """Queue a request.

        Raises:
            ApiError: the queue is full (429), or the engine is closed (503).
        """
        with self._changed:
            if self.closed or not alive:
                raise internal("the server is shutting down", 503)
            if len(self._waiting) >= self.limits.max_queue:
                raise overloaded(f"{len(self._waiting)} requests are waiting; try again later")
            self._waiting.append(job)
            self._changed.notify_all()

    def withdraw(self, job: Job) -> bool:
        """Mark a request as cancelled. Return whether it was waiting, and so is out already."""
        job.cancelled = True
        with self._changed:
            waiting = job in self._waiting
            if waiting:
                self._waiting.remove(job)
            self._changed.notify_all()
        return waiting

    def next(self) -> Job | None:
        """Take the oldest waiting request, if it fits; wait for one while nothing runs."""
        with self._changed:
            while not self._waiting and not self._running and not self.closed:
                self._changed.wait()
            if self.closed or not self._waiting:
                return None
            job = self._waiting[0]
            answers = sum(other.generation.choices for other in self._running)
            if self._running and (
                answers + job.generation.choices > self.limits.max_running or job.reserved > self._free()
            ):
                return None
            self._waiting.pop(0)
            self._running.append(job)
            return job

    def late(self) -> list[Job]:
        """Take the requests out whose time is over; those that run stay in the list until `remove`."""
        now = time.monotonic()
        with self._changed:
            waiting = [job for job in self._waiting if job.deadline < now]
            for job in waiting:
                self._waiting.remove(job)
            return [*waiting, *(job for job in self._running if job.deadline < now)]

    def running(self) -> list[Job]:
        """The requests that run, oldest first."""
        with self._changed:
            return list(self._running)

    def remove(self, job: Job) -> None:
        """A request has ended."""
        with self._changed:
            if job in self._running:
                self._running.remove(job)

    def free(self) -> int:
        """Bytes that no running request has reserved; negative where one stores more than was expected."""
        with self._changed:
            return self._free()

    def _free(self) -> int:
        return self.kv_bytes - sum(job.reserved for job in self._running)

    def close(self) -> None:
        """Wake up everybody; nothing begins any more."""
        with self._changed:
            self.closed = True
            self._changed.notify_all()

    def clear(self) -> list[Job]:
        """Take all requests out of the queue; return them with those that run."""
        with self._changed:
            jobs = [*self._waiting, *self._running]
            self._waiting.clear()
        return jobs

    def status(self, alive: bool) -> Status:
        """See `Engine.status`."""
        with self._changed:
            jobs = list(self._running)
            return Status(
                queue=len(self._waiting),
                running=sum(job.generation.choices for job in jobs),
                reserved_bytes=sum(job.reserved for job in jobs),
                stored_bytes=sum(job.stored_bytes for job in jobs),
                full_bytes=sum(job.full_bytes for job in jobs),
                host_bytes=sum(job.host_bytes for job in jobs),
                alive=alive and not self.closed,
            )

"""Serve requests with transformers and any method: one worker thread, which owns the model.

The worker reads one prompt at a time and then runs one decode step of each running answer in turn, so that a long
answer does not hold up short ones. Steps of several requests are not batched: each has a cache of its own.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import inspect
import logging
import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from foveakv.engines.transformers import compat
from foveakv.engines.transformers.api import cache_for
from foveakv.methods.full import Full
from foveakv.serving.admission import Sizes
from foveakv.serving.choice import Choice, Policy
from foveakv.serving.engine import Done, Event, Failed, Generation, Sink, Status
from foveakv.serving.errors import ApiError, internal, of_exception, overloaded
from foveakv.serving.job import Answer, Job
from foveakv.serving.limits import Limits, default_kv_bytes
from foveakv.serving.metrics import Metrics
from foveakv.serving.text import TokenTexts
from foveakv.serving.usage import usage_of

log = logging.getLogger("foveakv.serving")


class TransformersEngine:
    """Runs requests on one model; see `foveakv.serving.engine.Engine`.

    model, processor: from `foveakv.load`. The model must not be used elsewhere while the engine is open.
    """

    def __init__(
        self,
        model: Any,
        processor: Any,
        *,
        policy: Policy | None = None,
        limits: Limits | None = None,
        metrics: Metrics | None = None,
    ) -> None:
        self.model = model
        self.policy = policy or Policy()
        self.limits = limits or Limits()
        self.metrics = metrics or Metrics()
        self.sizes = Sizes(model)
        self.kv_bytes = self.limits.kv_bytes or default_kv_bytes(model.device)
        # A copy, because tokenizers must not be used by two threads at once, and another thread builds inputs.
        self._tokenizer = copy.deepcopy(getattr(processor, "tokenizer", processor))
        self._texts = TokenTexts(self._tokenizer)
        ends = getattr(model.generation_config, "eos_token_id", None)
        ends = self._tokenizer.eos_token_id if ends is None else ends
        self._ends = frozenset(ends if isinstance(ends, (list, tuple)) else [] if ends is None else [ends])
        self._suppressed = list(getattr(model.generation_config, "suppress_tokens", None) or [])
        self._name = compat.cache_argument(model)
        takes = inspect.signature(type(model).forward).parameters
        self._last_only = {"logits_to_keep": 1} if "logits_to_keep" in takes else {}
        cache_for(model, self.policy.default().method, options=self.policy.default().options)  # refuses at the start
        self._changed = threading.Condition()
        self._waiting: deque[Job] = deque()
        self._running: list[Job] = []
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="foveakv-engine", daemon=True)
        self._thread.start()

    # ---- called from any thread

    def submit(self, generation: Generation, sink: Sink) -> Job:
        """See `Engine.submit`."""
        generation = self._with_method(generation)
        tokens, new = generation.prompt_tokens, generation.max_new_tokens
        self.policy.check_share(generation.choice.method, self.sizes.geometry(tokens))
        needed = generation.choices * self.sizes.estimate(
            generation.choice.method, generation.choice.options, tokens, new
        )
        if needed > self.kv_bytes:
            raise ApiError(
                400,
                f"the caches of this request may take {needed:,} bytes, and this server has {self.kv_bytes:,}; use a "
                "smaller budget, fewer images, a smaller max_tokens or n",
                code="request_too_large",
            )
        if generation.choices > self.limits.max_running:
            raise ApiError(400, f"n is at most {self.limits.max_running} on this server", param="n")
        job = Job(generation, sink, needed, time.monotonic() + self.limits.request_seconds)
        with self._changed:
            if not self._alive:
                raise internal("the server is shutting down", 503)
            if len(self._waiting) >= self.limits.max_queue:
                raise overloaded(f"{len(self._waiting)} requests are waiting; try again later")
            self._waiting.append(job)
            self._changed.notify_all()
        return job

    def cancel(self, handle: Any) -> None:
        """See `Engine.cancel`."""
        handle.cancelled = True
        with self._changed:
            waiting = handle in self._waiting
            if waiting:
                self._waiting.remove(handle)
            self._changed.notify_all()
        if waiting:
            self._end(handle, None)

    def status(self) -> Status:
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
                alive=self._alive,
            )

    def close(self) -> None:
        """See `Engine.close`."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    @property
    def _alive(self) -> bool:
        return not self._closed and self._thread.is_alive()

    def _with_method(self, generation: Generation) -> Generation:
        """Text prompts are stored whole where the server's default method evicts visual tokens only."""
        choice = generation.choice
        if generation.images or choice.chosen or not choice.method.visual_only:
            return generation
        return dataclasses.replace(generation, choice=Choice(Full(), choice.options))

    # ---- the worker

    def _run(self) -> None:
        try:
            with torch.inference_mode():
                while not self._closed:
                    self._drop_ended()
                    job = self._next()
                    if job is not None:
                        with self._reported(job):
                            self._read_prompt(job)
                    for running in list(self._running):
                        with self._reported(running):
                            self._step(running)
        except BaseException:
            log.exception("the engine has stopped")
            raise
        finally:
            self._closed = True
            with self._changed:
                jobs = [*self._waiting, *self._running]
                self._waiting.clear()
            for job in jobs:
                self._end(job, Failed(internal("the server is shutting down", 503)))

    def _next(self) -> Job | None:
        """The oldest waiting request, if it fits; waits for one while nothing runs."""
        with self._changed:
            while not self._waiting and not self._running and not self._closed:
                self._changed.wait()
            if self._closed or not self._waiting:
                return None
            job = self._waiting[0]
            running = sum(other.generation.choices for other in self._running)
            reserved = sum(other.reserved for other in self._running)
            if self._running and (
                running + job.generation.choices > self.limits.max_running or reserved + job.reserved > self.kv_bytes
            ):
                return None
            self._waiting.popleft()
            self._running.append(job)
            return job

    def _drop_ended(self) -> None:
        """Drop requests that were cancelled or have run out of time."""
        now = time.monotonic()
        with self._changed:
            late = [job for job in self._waiting if job.deadline < now]
            for job in late:
                self._waiting.remove(job)
        for job in [*late, *self._running]:
            if job.cancelled:
                self._end(job, None)
            elif job.deadline < now:
                seconds = self.limits.request_seconds
                self._end(job, Failed(internal(f"the request took more than {seconds:g} seconds", 504)))

    @contextlib.contextmanager
    def _reported(self, job: Job) -> Iterator[None]:
        """An exception ends the request that caused it, and no other."""
        try:
            yield
        except Exception as error:
            found = of_exception(error)
            if found.status >= 500:
                log.error("a request has failed", exc_info=error)
            error.__traceback__ = error.__context__ = error.__cause__ = None  # their frames hold the cache
            self._end(job, Failed(found))

    def _end(self, job: Job, event: Event | None) -> None:
        """Free the memory of a request, then send its last event. event: None where nobody listens any more."""
        with self._changed:
            if job in self._running:
                self._running.remove(job)
        job.release()
        outcome = "cancelled" if event is None else "ok" if isinstance(event, Done) else "error"
        self.metrics.ended(job, outcome)
        if event is not None:
            job.send(event)

    def _read_prompt(self, job: Job) -> None:
        """The prefill, and the first token of every answer."""
        if job.cancelled:
            return
        generation, choice = job.generation, job.generation.choice
        job.started = time.monotonic()
        cache = cache_for(self.model, choice.method, options=choice.options)
        inputs = {**generation.inputs, self._name: cache}
        logits = self.model(**inputs, use_cache=True, **self._last_only).logits[0, -1]
        job.prefilled = time.monotonic()
        caches = [cache, *(copy.deepcopy(cache) for _ in range(generation.choices - 1))]
        job.answers = [Answer(i, own, generation, self._tokenizer) for i, own in enumerate(caches)]
        job.begin(self.sizes)
        self._check_fits(job)
        self.metrics.prefilled(job)
        for answer in job.answers:
            self._accept(job, answer, logits)
        self._complete(job)

    def _check_fits(self, job: Job) -> None:
        """What is stored is known now, and replaces the estimate."""
        with self._changed:
            reserved = sum(other.reserved for other in self._running)
        if reserved > self.kv_bytes:
            raise ApiError(
                503,
                f"{job.generation.choice.method.name} stores more of this prompt than expected, and the server's "
                "memory for caches is full; use a smaller budget, or try again later",
                kind="server_error",
                code="overloaded",
                retry_after=5,
            )

    def _step(self, job: Job) -> None:
        """One decode step of every answer of a request."""
        if not job.answers:  # cancelled before its prefill
            return
        for answer in job.active:
            if job.cancelled:
                return
            ids = torch.tensor([[answer.last]], device=self.model.device)
            logits = self.model(input_ids=ids, **{self._name: answer.cache}, use_cache=True).logits[0, -1]
            self._accept(job, answer, logits)
        job.note_bytes(self.sizes)
        self._complete(job)

    def _accept(self, job: Job, answer: Answer, logits: Tensor) -> None:
        """Choose the next token of an answer, and send what is complete."""
        scores = logits.float().cpu()
        if self._suppressed:
            scores = scores.index_fill(0, torch.tensor(self._suppressed), float("-inf"))
        for event in answer.accept(scores, self._ends, self._texts):
            job.send(event)
        self.metrics.token()
        if answer.reason is not None:
            answer.report()

    def _complete(self, job: Job) -> None:
        if job.active:
            return
        self._end(job, Done(usage_of(job)))

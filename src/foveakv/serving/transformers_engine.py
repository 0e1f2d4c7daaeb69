"""Serve requests with transformers and any method: one worker thread, which owns the model.

The worker reads one prompt at a time (`prompts.py`) and decodes all running answers together, one token each at a time,
in one forward pass over all of their caches (`steps.py`). While a prompt is read, decode steps run between its layers
and chunks: neither a long prompt nor a long answer holds up the others. Requests begin in the order in which they came
(`roster.py`), join the next decode step when their prompt has been read, and leave with their last token.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import logging
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from foveakv.engines.transformers.api import cache_for
from foveakv.methods.full import Full
from foveakv.serving.admission import Sizes
from foveakv.serving.choice import Choice, Policy
from foveakv.serving.engine import Done, Event, Failed, Generation, Sink, Status
from foveakv.serving.errors import ApiError, internal, of_exception
from foveakv.serving.job import Answer, Job
from foveakv.serving.limits import Limits, default_kv_bytes
from foveakv.serving.metrics import Metrics
from foveakv.serving.prompts import PromptReader, fork
from foveakv.serving.roster import Roster
from foveakv.serving.steps import Steps
from foveakv.serving.text import TokenTexts
from foveakv.serving.usage import usage_of

log = logging.getLogger("foveakv.serving")


class _StopReading(Exception):
    """The request whose prompt is being read has ended."""


class TransformersEngine:
    """Runs requests on one model; see `foveakv.serving.engine.Engine`.

    model, processor: from `foveakv.load`. The model must not be used elsewhere while the engine is open. chunk: tokens
    of a chunk; longer prompts are read in chunks, where the method can and there is memory to hold them whole. stall:
    seconds that a prompt is read for between two decode steps of the others; longer where a step takes longer, so that
    reading gets at least half of the time.
    """

    def __init__(
        self,
        model: Any,
        processor: Any,
        *,
        policy: Policy | None = None,
        limits: Limits | None = None,
        metrics: Metrics | None = None,
        chunk: int | None = 2048,
        stall: float = 0.1,
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
        self._prompts = PromptReader(model, chunk)
        self._steps = Steps(model, getattr(model.generation_config, "suppress_tokens", None) or ())
        cache_for(model, self.policy.default().method, options=self.policy.default().options)  # refuses at the start
        self._roster = Roster(self.limits, self.kv_bytes)
        self._stall = stall
        self._reading: Job | None = None
        self._stepped = 0.0  # time.monotonic() after the latest decode step
        self._step_seconds = 0.0
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
        self._roster.add(job, self._thread.is_alive())
        return job

    def cancel(self, handle: Any) -> None:
        """See `Engine.cancel`."""
        if self._roster.withdraw(handle):
            self._end(handle, None)

    def status(self) -> Status:
        """See `Engine.status`."""
        return self._roster.status(self._thread.is_alive())

    def answering(self) -> list[tuple[Job, Answer]]:
        """The answers that are being decoded, of requests whose prompts have been read."""
        return [(job, answer) for job in self._roster.running() if not job.cancelled for answer in job.active]

    def close(self) -> None:
        """See `Engine.close`."""
        self._roster.close()
        if threading.current_thread() is not self._thread:
            self._thread.join()

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
                while not self._roster.closed:
                    self._drop_ended()
                    job = self._roster.next()
                    if job is not None:
                        with self._reported(job):
                            self._read_prompt(job)
                    self._decode()
        except BaseException:
            log.exception("the engine has stopped")
            raise
        finally:
            self._roster.close()
            for job in self._roster.clear():
                self._end(job, Failed(internal("the server is shutting down", 503)))

    def _drop_ended(self) -> None:
        """Drop requests that were cancelled or have run out of time; the one being read is stopped by `_pause`."""
        for job in self._roster.running():
            if job.cancelled and job is not self._reading:
                self._end(job, None)
        for job in self._roster.late():
            if job is not self._reading:
                self._end(job, self._too_late())

    def _too_late(self) -> Failed:
        return Failed(internal(f"the request took more than {self.limits.request_seconds:g} seconds", 504))

    @contextlib.contextmanager
    def _reported(self, job: Job) -> Iterator[None]:
        """An exception ends the request that caused it, and no other."""
        try:
            yield
        except Exception as error:
            self._fail(job, error)

    def _fail(self, job: Job, error: Exception) -> None:
        found = of_exception(error)
        if found.status >= 500:
            log.error("a request has failed", exc_info=error)
        error.__traceback__ = error.__context__ = error.__cause__ = None  # their frames hold the cache
        self._end(job, Failed(found))

    def _end(self, job: Job, event: Event | None) -> None:
        """Free the memory of a request, then send its last event. event: None where nobody listens any more."""
        self._roster.remove(job)
        job.release()
        outcome = "cancelled" if event is None else "ok" if isinstance(event, Done) else "error"
        self.metrics.ended(job, outcome)
        if event is not None:
            job.send(event)

    # ---- prompts

    def _read_prompt(self, job: Job) -> None:
        """The prefill, and the first token of every answer."""
        if job.cancelled:
            return
        generation, choice = job.generation, job.generation.choice
        job.started = time.monotonic()
        cache = cache_for(self.model, choice.method, options=choice.options)
        ends = self._prompts.ends(generation.inputs, choice.method)
        whole = job.prompt_tokens * self.sizes.token_bytes
        if len(ends) > 1 and whole > self._roster.free():
            ends = ends[-1:]  # in one pass, a layer is compressed as soon as it has been read
        elif len(ends) > 1:
            job.reserved += whole
        logits = None
        self._reading = job
        try:
            with contextlib.suppress(_StopReading):
                logits = self._prompts.read(generation.inputs, cache, ends, self._pause)
        finally:
            self._reading = None
        if logits is None:
            return  # the worker's loop ends the request, for the reason why it was stopped
        job.prefilled = time.monotonic()
        caches = fork(cache, generation.choices)
        job.answers = [Answer(i, own, generation, self._tokenizer) for i, own in enumerate(caches)]
        job.begin(self.sizes)
        self._check_fits(job)
        self.metrics.prefilled(job)
        scores = self._steps.scores(logits)
        for answer in job.answers:
            self._accept(job, answer, scores)
        self._complete(job)

    def _pause(self, inside: bool) -> None:
        """Called while a prompt is read. inside: in the middle of a forward pass."""
        reading = self._reading
        if self._roster.closed or reading is None or reading.cancelled or reading.deadline < time.monotonic():
            raise _StopReading
        if time.monotonic() - self._stepped < max(self._stall, self._step_seconds):
            return
        self._drop_ended()
        self._decode(inside)

    def _check_fits(self, job: Job) -> None:
        """What is stored is known now, and replaces the estimate."""
        if self._roster.free() < 0:
            raise ApiError(
                503,
                f"{job.generation.choice.method.name} stores more of this prompt than expected, and the server's "
                "memory for caches is full; use a smaller budget, or try again later",
                kind="server_error",
                code="overloaded",
                retry_after=5,
            )

    # ---- answers

    def _decode(self, inside: bool = False) -> None:
        """One decode step of all answers; inside another pass, of those whose caches can be joined.

        A cache that is not joined puts its M-RoPE offset on the model, where the outer pass has its own.
        """
        active = self.answering()
        if inside:
            active = [
                (job, answer) for job, answer in active if answer.cache is not None and Steps.joinable(answer.cache)
            ]
        if not active:
            return
        began = time.monotonic()
        caches = [answer.cache for _, answer in active if answer.cache is not None]
        results = self._steps.run(caches, [answer.last for _, answer in active])
        for (job, answer), scores in zip(active, results, strict=True):
            if isinstance(scores, Exception):
                if job in self._roster.running():  # else another of its answers has failed
                    self._fail(job, scores)
            elif answer.cache is not None:
                with self._reported(job):
                    self._accept(job, answer, scores)
        for job in self._roster.running():
            if any(job is other for other, _ in active):
                job.note_bytes(self.sizes)
                self._complete(job)
        self._stepped = time.monotonic()
        self._step_seconds = self._stepped - began

    def _accept(self, job: Job, answer: Answer, scores: Tensor) -> None:
        """Choose the next token of an answer, and send what is complete."""
        for event in answer.accept(scores, self._ends, self._texts):
            job.send(event)
        self.metrics.token()
        if answer.reason is not None:
            answer.report()

    def _complete(self, job: Job) -> None:
        if job.active:
            return
        self._end(job, Done(usage_of(job)))

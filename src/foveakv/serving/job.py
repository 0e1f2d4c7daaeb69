"""State of a request while an engine runs it."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

from torch import Tensor

from foveakv.engines.transformers.report import Report
from foveakv.serving.engine import Delta, Event, Finished, FinishReason, Generation, Sink
from foveakv.serving.kept import Kept, kept_patches
from foveakv.serving.sampling import Sampler, top
from foveakv.serving.text import TextStream, TokenTexts

if TYPE_CHECKING:
    from foveakv.engines.transformers.cache import CompressedCache
    from foveakv.serving.admission import Sizes

NOTED = 8
"""Decode steps between two looks at the stored bytes."""

log = logging.getLogger("foveakv.serving")


class Answer:
    """One of the `n` answers of a request.

    cache: freed with the last token. tokens: generated so far, an end token included. reason: why the answer has ended.
    """

    def __init__(self, index: int, cache: CompressedCache, generation: Generation, tokenizer: Any) -> None:
        self.index = index
        self.cache: CompressedCache | None = cache
        self.tokens = 0
        self.last = -1
        self.reason: FinishReason | None = None
        self.final: Report | None = None
        self.kept: Kept | None = None
        self._generation = generation
        self._sampler = Sampler(generation.sampling, index)
        self._text = TextStream(tokenizer, generation.stops)
        self._entries: list[tuple[int, dict[str, Any]]] = []  # log-probabilities that have not been sent

    def accept(self, logits: Tensor, ends: frozenset[int], texts: TokenTexts) -> list[Event]:
        """Choose the next token from logits [vocabulary]; return what can be sent."""
        token = self._sampler.draw(logits)
        self.last = token
        self.tokens += 1
        if token in ends:
            return self._finish("stop")
        if self._generation.logprobs is not None:
            self._entries.append((self._text.decoded, _entry(texts, logits, token, self._generation.logprobs)))
        piece = self._text.push(token)
        if self._text.stopped:
            return [*self._delta(piece), *self._finish("stop")]
        if self.tokens >= self._generation.max_new_tokens:
            return [*self._delta(piece), *self._finish("length")]
        return self._delta(piece)

    def report(self) -> None:
        """Take the figures of the cache, and free it."""
        if self.cache is None:
            return
        self.final = Report.of(self.cache)
        if self._generation.kept:
            self.kept = kept_patches(self.cache, self._generation.images, self._generation.kept == "layers")
        self.cache = None

    def _finish(self, reason: FinishReason) -> list[Event]:
        rest = self._text.finish()
        if self._text.stopped:
            reason = "stop"
        self.reason = reason
        found = self._delta(rest, everything=not self._text.stopped)
        self._entries = []
        return [*found, Finished(self.index, reason)]

    def _delta(self, text: str, everything: bool = False) -> list[Event]:
        """A piece with the log-probabilities of the tokens that begin in it, or of all that are left."""
        own = [entry for place, entry in self._entries if everything or place < self._text.sent]
        self._entries = self._entries[len(own) :]
        return [Delta(self.index, text, own)] if text or own else []


class Job:
    """A submitted request.

    reserved: KV bytes that it may come to store. deadline, submitted, started, prefilled, first: times of
    `time.monotonic`; started: when its prefill began; first: of the first piece that was sent.
    """

    def __init__(self, generation: Generation, sink: Sink, reserved: int, deadline: float) -> None:
        self.generation: Generation = generation
        self.reserved = reserved
        self.deadline = deadline
        self.submitted = time.monotonic()
        self.started: float | None = None
        self.prefilled: float | None = None
        self.first: float | None = None
        self.cancelled = False
        self.answers: list[Answer] = []
        self.prompt_tokens = generation.prompt_tokens
        self.stored_bytes = self.full_bytes = self.host_bytes = 0
        self._sink = sink
        self._steps = 0

    @property
    def active(self) -> list[Answer]:
        """The answers that are not complete."""
        return [answer for answer in self.answers if answer.reason is None]

    def send(self, event: Event) -> None:
        """Pass an event on."""
        if self.first is None and isinstance(event, Delta):
            self.first = time.monotonic()
        try:
            self._sink(event)
        except Exception:  # the other side has gone, for instance its event loop
            log.debug("an event could not be delivered", exc_info=True)
            self.cancelled = True

    def begin(self, sizes: Sizes) -> None:
        """Called after the prefill: the estimate is replaced by what is stored and what may be added."""
        self._measure(sizes)
        growth = sizes.growth(self.generation.choice.options, self.generation.max_new_tokens)
        self.reserved = self.stored_bytes + len(self.answers) * growth

    def note_bytes(self, sizes: Sizes) -> None:
        """Called after every decode step."""
        self._steps += 1
        if self._steps % NOTED == 0:
            self._measure(sizes)

    def release(self) -> None:
        """Free all memory."""
        for answer in self.answers:
            answer.cache = None
        self.generation = Generation(
            inputs={"input_ids": _Length(self.prompt_tokens)},
            choice=self.generation.choice,
            max_new_tokens=self.generation.max_new_tokens,
            choices=self.generation.choices,
        )
        self.reserved = self.stored_bytes = self.full_bytes = self.host_bytes = 0

    def _measure(self, sizes: Sizes) -> None:
        caches = [answer.cache for answer in self.answers if answer.cache is not None]
        self.stored_bytes = sum(cache.stored_nbytes for cache in caches)
        self.full_bytes = sum(cache.seen for cache in caches) * sizes.token_bytes
        self.host_bytes = sum(layer.host_nbytes for cache in caches for layer in cache.compressed)


class _Length:
    """The shape of inputs that have been freed."""

    def __init__(self, tokens: int) -> None:
        self.shape = (1, tokens)


def _entry(texts: TokenTexts, logits: Tensor, token: int, count: int) -> dict[str, Any]:
    own, others = top(logits, token, count)
    return {**texts.entry(token, own), "top_logprobs": [texts.entry(other, value) for other, value in others]}

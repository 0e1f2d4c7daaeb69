"""One item, several methods: replies, agreement with the full cache, bytes and times."""

from __future__ import annotations

import contextlib
import copy
import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, TypeVar

import torch
from torch import Tensor

from foveakv.engines.transformers.cache import CompressedCache
from foveakv.engines.transformers.report import Report
from foveakv.errors import MethodError, UnsupportedModeError
from foveakv.evaluation.agreement import Agreement, add
from foveakv.evaluation.compare import Candidate
from foveakv.evaluation.decoding import Speaker
from foveakv.evaluation.grading import grade
from foveakv.evaluation.items import Item
from foveakv.evaluation.replay import Recording, read, record, replay, replays
from foveakv.evaluation.results import FULL, Result, TurnResult, describe_error
from foveakv.methods import Method
from foveakv.methods.full import Full
from foveakv.methods.random import Random
from foveakv.models.inputs import build_inputs
from foveakv.models.loading import Loaded
from foveakv.util.timing import StepClock

T = TypeVar("T")

TIMED = 8
"""Decode steps whose median is a method's time per token."""
FULL_PLACE = -1
"""Stands for the full cache among the places of methods."""


@dataclass
class _Talk:
    """A conversation: replies (one per turn), the cache's report at the end of the first, and the logits behind which
    each token of the full cache's replies was chosen (empty for methods)."""

    cache: CompressedCache
    replies: list[list[int]]
    report: Report | None = None
    logits: list[list[Tensor]] | None = None


class Bench:
    """Runs items on one loaded model.

    Args:
        loaded: model and processor.
        backend, kv_dtype: as for `foveakv.compress`.
        time_every: `token_seconds` is measured on every so many items, each method alone; 0 never measures it.
    """

    def __init__(
        self, loaded: Loaded, *, backend: str = "auto", kv_dtype: str | None = None, time_every: int = 10
    ) -> None:
        self.loaded = loaded
        self.options = {"backend": backend, "kv_dtype": kv_dtype}
        self.time_every = time_every
        self.speaker = Speaker(loaded.model, loaded.processor)

    def run(self, item: Item, candidates: Sequence[Candidate]) -> Iterator[Result]:
        """One result per candidate, in their order; where something raises, a result with `error`.

        The prompt is read once; every method then compresses the same recorded prefill (`replay.py`), except where
        that cannot be: then each reads it for itself, with the same outcome. Methods decode side by side, as rows of a
        batch (`bundle.py`), each over its own cache.
        """
        try:
            prompt = _Prompt(self, item)
            full = prompt.talk([prompt.full], keep_logits=True)[0]
        except Exception as error:  # a method may raise anything; the others go on
            for candidate in candidates:
                yield self._failed(item, candidate, error)
            return
        methods = [_drawn(candidate.method, item) for candidate in candidates]
        agreements = [Agreement() for _ in methods]
        given = _each(methods, lambda places: prompt.follow(full, [methods[i] for i in places], places, agreements))
        # Whoever says what the full cache says needs no conversation of its own.
        differing = [i for i, talk in enumerate(given) if isinstance(talk, _Talk) and agreements[i].differs]
        own = _each(differing, lambda places: prompt.talk([methods[differing[i]] for i in places]))
        talks = list(given)
        for i, talk in zip(differing, own, strict=True):
            talks[i] = talk
        for i, method in enumerate(methods):
            if method.name == FULL:  # the yardstick itself, not a second run of it
                talks[i], agreements[i] = full, Agreement.perfect(sum(map(len, full.replies)) - 1)
        seconds = self._times(prompt, full, methods, talks)
        for i, (candidate, found, agreement) in enumerate(zip(candidates, talks, agreements, strict=True)):
            try:
                if isinstance(found, Exception):
                    raise found
                took = seconds.get(i)
                if isinstance(took, Exception):
                    raise took
                beside = seconds.get(FULL_PLACE)
                yield self._result(
                    prompt, full, candidate, found, agreement, took, None if isinstance(beside, Exception) else beside
                )
            except Exception as error:  # a method may raise anything; the others go on
                yield self._failed(item, candidate, error)

    def _times(
        self, prompt: _Prompt, full: _Talk, methods: Sequence[Method], talks: Sequence[_Talk | Exception]
    ) -> dict[int, float | Exception | None]:
        """Seconds per token of the methods that have not failed, by their places, and of the full cache beside them by
        `FULL_PLACE`; empty where an item is not timed."""
        if not self.time_every or prompt.item.number % self.time_every:
            return {}
        good = [FULL_PLACE, *(i for i, talk in enumerate(talks) if isinstance(talk, _Talk) and methods[i].name != FULL)]
        own = [prompt.full if i == FULL_PLACE else methods[i] for i in good]
        reply = full.replies[0]
        times = _each(good, lambda places: prompt.token_seconds([own[i] for i in places], reply))
        found = dict(zip(good, times, strict=True))
        return {**found, **{i: found[FULL_PLACE] for i, method in enumerate(methods) if method.name == FULL}}

    def _result(
        self,
        prompt: _Prompt,
        full: _Talk,
        candidate: Candidate,
        talk: _Talk,
        agreement: Agreement,
        token_seconds: float | None,
        full_token_seconds: float | None,
    ) -> Result:
        item, report = prompt.item, talk.report
        if agreement.kl is not None and not math.isfinite(agreement.kl):
            raise MethodError("the logits are no numbers; the method has spoilt keys or values")
        if report is None:
            raise UnsupportedModeError(f"item {item.number} of {item.task} has no turn")
        turns = tuple(
            TurnResult(
                turn.text, text := self.speaker.text(reply), turn.answer, grade(turn, text), len(turn.facts), len(reply)
            )
            for turn, reply in zip(item.turns, talk.replies, strict=True)
        )
        totals = report.to_dict()
        return Result(
            **self._who(item, candidate),
            score=sum(turn.score for turn in turns) / len(turns),
            turns=turns,
            match=agreement.match,
            equal=agreement.equal,
            kl=agreement.kl,
            scored=agreement.scored,
            log_likelihood=prompt.likelihood(full, talk.replies[0]) if item.long else None,
            context=prompt.tokens,
            stored_bytes=totals["stored_bytes"],
            full_bytes=totals["full_bytes"],
            host_bytes=totals["host_bytes"],
            peak_bytes=totals["peak_bytes"],
            evicted=totals["evicted"],
            retrieved=totals["retrieved"],
            hits=sum(layer.hits for layer in report.layers),
            token_seconds=token_seconds,
            prefill_seconds=talk.cache.prefill_seconds,
            full_token_seconds=full_token_seconds,
            details=_details(talk.cache),
        )

    def _who(self, item: Item, candidate: Candidate) -> dict[str, Any]:
        method = candidate.method
        return {
            "task": item.task, "item": item.number, "seed": item.seed, "method": method.name,
            "budget": getattr(method, "budget", None), "label": candidate.label, "settings": method.describe(),
        }  # fmt: skip

    def _failed(self, item: Item, candidate: Candidate, error: Exception) -> Result:
        return Result(**self._who(item, candidate), error=describe_error(error))


class _Prompt:
    """An item's prompt, read once."""

    def __init__(self, bench: Bench, item: Item) -> None:
        self.bench, self.item, self.speaker = bench, item, bench.speaker
        model, processor = bench.loaded
        self.inputs = build_inputs(processor, item.turns[0].text, item.images, model=model)
        self.tokens = int(self.inputs["input_ids"].shape[1])
        self._recording: Recording | None = None
        self.full = Full()
        self._begun: dict[int, tuple[CompressedCache, Tensor]] = {}
        with contextlib.suppress(UnsupportedModeError):  # then every method reads the prompt for itself
            self._recording = record(model, self.inputs)

    def begin(self, method: Method) -> tuple[CompressedCache, Tensor]:
        """A cache that has read the prompt, and the logits [vocabulary] behind it: each time a copy of the same."""
        if id(method) not in self._begun:
            self._begun[id(method)] = self._read(method)
        cache, logits = self._begun[id(method)]
        return copy.deepcopy(cache), logits

    def _read(self, method: Method) -> tuple[CompressedCache, Tensor]:
        options = self.bench.options
        if self._recording is None or not replays(method):
            return read(self.bench.loaded.model, self.inputs, method, **options)
        return replay(self._recording, method, **options), self._recording.logits

    def talk(self, methods: Sequence[Method], *, keep_logits: bool = False) -> list[_Talk]:
        """The conversation with each method's own replies."""
        talks, logits = self._begin(methods)
        for number, turn in enumerate(self.item.turns):
            if number:
                logits = self._ask(talks, turn.text)
            caches = [talk.cache for talk in talks]
            replies, chosen_from = self.speaker.reply_all(caches, logits, turn.max_new_tokens)
            for talk, reply, own in zip(talks, replies, chosen_from, strict=True):
                talk.replies.append(reply)
                talk.report = talk.report or Report.of(talk.cache)
                if keep_logits:
                    talk.logits = [*(talk.logits or []), own]
        return talks

    def follow(
        self, full: _Talk, methods: Sequence[Method], places: Sequence[int], agreements: Sequence[Agreement]
    ) -> list[_Talk]:
        """The conversation with the full cache's replies; what methods would have said goes into their agreements.

        The first token of the first reply is left out: it is chosen by the prefill, which sees the whole prompt (unless
        the method took tokens out of the residual stream).
        """
        talks, logits = self._begin(methods)
        fresh = [Agreement() for _ in methods]
        skip = [replays(method) for method in methods]
        for number, (turn, reply, expected) in enumerate(
            zip(self.item.turns, full.replies, full.logits or [], strict=True)
        ):
            if number:
                logits = self._ask(talks, turn.text)
            for step, (token, wanted) in enumerate(zip(reply, expected, strict=True)):
                judged = [i for i in range(len(talks)) if number or step or not skip[i]]
                if judged:
                    add([fresh[i] for i in judged], wanted, [logits[i].float() for i in judged])
                if step + 1 < len(reply):
                    caches = [talk.cache for talk in talks]
                    logits = [out[-1] for out in self.speaker.feed_all(caches, [[token]] * len(talks))]
            for talk in talks:
                talk.replies.append(list(reply))
                talk.report = talk.report or Report.of(talk.cache)
        for place, agreement in zip(places, fresh, strict=True):
            agreements[place].same, agreements[place].divergences = agreement.same, agreement.divergences
        return talks

    def _begin(self, methods: Sequence[Method]) -> tuple[list[_Talk], list[Tensor]]:
        begun = [self.begin(method) for method in methods]
        return [_Talk(cache, []) for cache, _ in begun], [logits for _, logits in begun]

    def _ask(self, talks: Sequence[_Talk], question: str) -> list[Tensor]:
        """The next question to all; the logits behind it."""
        tokens = [self.speaker.follow_up(question, talk.replies[-1][-1]) for talk in talks]
        return [out[-1] for out in self.speaker.feed_all([talk.cache for talk in talks], tokens)]

    def likelihood(self, full: _Talk, reply: list[int]) -> float:
        """Mean log-probability that the full cache gives to the tokens of a first reply."""
        if reply == full.replies[0] and full.logits is not None:
            logits = torch.stack(full.logits[0])
        else:
            cache, first = self.begin(self.full)
            logits = first.float()[None]
            if len(reply) > 1:
                logits = torch.cat([logits, self.speaker.feed(cache, reply[:-1])])
        chosen = torch.tensor(reply, device=logits.device)[:, None]
        return float(logits.log_softmax(-1).gather(-1, chosen).mean())

    def token_seconds(self, methods: Sequence[Method], reply: Sequence[int]) -> list[float | None]:
        """Medians of the first decode steps over the full cache's reply, each step alone; None: it has one token.

        Methods step in turns, so that a busy moment of the machine does not hit one of them alone.
        """
        caches = [self.begin(method)[0] for method in methods]
        clocks = [StepClock(self.bench.loaded.model) for _ in methods]
        for token in reply[: min(TIMED, len(reply) - 1)]:
            for cache, clock in zip(caches, clocks, strict=True):
                with clock:
                    self.speaker.feed(cache, [token])
        return [median(clock.seconds) if clock.seconds else None for clock in clocks]


def _drawn(method: Method, item: Item) -> Method:
    """Random tokens are drawn anew for every item, so that intervals over items hold the luck of the draw as well."""
    if not isinstance(method, Random):
        return method
    return replace(method, seed=zlib.crc32(f"{method.seed} {item.task} {item.number} {item.seed}".encode()))


def _each(items: Sequence[Any], work: Callable[[Sequence[int]], list[T]]) -> list[T | Exception]:
    """All at once; where that raises, one at a time, so that an error belongs to the item that causes it."""
    places = range(len(items))
    if not items:
        return []
    try:
        return list(work(places))
    except Exception:  # a method may raise anything
        found: list[T | Exception] = []
        for place in places:
            try:
                found += work([place])
            except Exception as error:
                found.append(error)
        return found


def _details(cache: CompressedCache) -> dict[str, Any] | None:
    """What a method reports, with the map of static heads, layers x heads, of methods that classify heads."""
    results = cache.results
    found = dict(results.figures)
    if results.heads is not None:
        found["static_heads"] = results.heads.static[0].to(torch.int8).tolist()
    return found or None

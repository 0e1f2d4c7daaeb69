"""Run methods on one item: replies, agreement with the full cache, bytes and times."""

from __future__ import annotations

import contextlib
import copy
import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from statistics import median
from typing import Any, TypeVar

import torch
from torch import Tensor

from foveakv.engines.transformers.cache import CompressedCache
from foveakv.engines.transformers.report import Report
from foveakv.errors import MethodError, UnsupportedModeError
from foveakv.evaluation.agreement import Agreement, add
from foveakv.evaluation.compare import Candidate, kept_share
from foveakv.evaluation.decoding import GreedyDecoder
from foveakv.evaluation.grading import grade
from foveakv.evaluation.items import Item
from foveakv.evaluation.replay import Recording, read, record, replay, replays
from foveakv.evaluation.results import FULL, Result, TurnResult, describe_error
from foveakv.methods import Method
from foveakv.methods.full import Full
from foveakv.models.inputs import build_inputs
from foveakv.models.loading import Loaded
from foveakv.util.timing import StepClock

T = TypeVar("T")

TIMED = 8
"""Decode steps whose median is a method's time per token."""
FULL_PLACE = -1
"""Index of the full cache, next to the indices of methods."""


@dataclass
class _Chat:
    """replies: one per turn. report: of the cache at the end of the first reply. logits: those that each token of the
    full cache's replies was chosen from (None for methods)."""

    cache: CompressedCache
    replies: list[list[int]]
    report: Report | None = None
    logits: list[list[Tensor]] | None = None


@dataclass(frozen=True)
class Followed:
    """A method along the full cache's replies. kept: [C] float, the share of (layer, head) pairs that store each column
    of the prompt. visual: bool [C], the image and video tokens among them."""

    agreement: Agreement
    kept: Tensor
    visual: Tensor


class Bench:
    """Runs items on one loaded model.

    Args:
        loaded: model and processor.
        backend, kv_dtype: as for `foveakv.compress`.
        time_every: `token_seconds` is measured on every n-th item, each method alone; 0 never measures it.
    """

    def __init__(
        self, loaded: Loaded, *, backend: str = "auto", kv_dtype: str | None = None, time_every: int = 10
    ) -> None:
        self.loaded = loaded
        self.options = {"backend": backend, "kv_dtype": kv_dtype}
        self.time_every = time_every
        self.decoder = GreedyDecoder(loaded.model, loaded.processor)

    def run(self, item: Item, candidates: Sequence[Candidate]) -> Iterator[Result]:
        """One result per candidate, in order; an exception becomes a result with `error`.

        The prompt is read once, and every method compresses the same recorded prefill (`replay.py`). If that is not
        possible, each method reads the prompt itself, with the same outcome. Methods decode as rows of a batch
        (`bundle.py`), each over its own cache.
        """
        try:
            prompt = _Prompt(self, item)
            full = prompt.chat([prompt.full], keep_logits=True)[0]
        except Exception as error:  # a method may raise anything; the others continue
            for candidate in candidates:
                yield self._failed(item, candidate, error)
            return
        methods = [_drawn(candidate.method, item) for candidate in candidates]
        agreements = [Agreement() for _ in methods]
        given = _each(methods, lambda places: prompt.follow(full, [methods[i] for i in places], places, agreements))
        # A method that always agrees with the full cache would have the same conversation.
        differing = [i for i, chat in enumerate(given) if isinstance(chat, _Chat) and agreements[i].differs]
        own = _each(differing, lambda places: prompt.chat([methods[differing[i]] for i in places]))
        chats = list(given)
        for i, chat in zip(differing, own, strict=True):
            chats[i] = chat
        for i, method in enumerate(methods):
            if method.name == FULL:  # the baseline itself, not a second run of it
                chats[i], agreements[i] = full, Agreement.perfect(sum(map(len, full.replies)) - 1)
        seconds = self._times(prompt, full, methods, chats)
        for i, (candidate, found, agreement) in enumerate(zip(candidates, chats, agreements, strict=True)):
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
            except Exception as error:  # a method may raise anything; the others continue
                yield self._failed(item, candidate, error)

    def follow(self, item: Item, methods: Sequence[Method]) -> list[Followed | Exception]:
        """Agreement of methods with the full cache on one item, without replies of their own; what a method raises is
        its outcome. An error of the full cache is raised."""
        prompt = _Prompt(self, item)
        full = prompt.chat([prompt.full], keep_logits=True)[0]
        agreements = [Agreement() for _ in methods]
        chats = _each(methods, lambda places: prompt.follow(full, [methods[i] for i in places], places, agreements))
        return [
            chat
            if isinstance(chat, Exception)
            else Followed(agreement, kept_share(chat.cache), chat.cache.full_prompt.visual[0].cpu())
            for chat, agreement in zip(chats, agreements, strict=True)
        ]

    def _times(
        self, prompt: _Prompt, full: _Chat, methods: Sequence[Method], chats: Sequence[_Chat | Exception]
    ) -> dict[int, float | Exception | None]:
        """Index -> seconds per token, for methods that have not failed and for the full cache (`FULL_PLACE`); empty if
        the item is not timed."""
        if not self.time_every or prompt.item.number % self.time_every:
            return {}
        good = [FULL_PLACE, *(i for i, chat in enumerate(chats) if isinstance(chat, _Chat) and methods[i].name != FULL)]
        own = [prompt.full if i == FULL_PLACE else methods[i] for i in good]
        reply = full.replies[0]
        times = _each(good, lambda places: prompt.token_seconds([own[i] for i in places], reply))
        found = dict(zip(good, times, strict=True))
        return {**found, **{i: found[FULL_PLACE] for i, method in enumerate(methods) if method.name == FULL}}

    def _result(
        self,
        prompt: _Prompt,
        full: _Chat,
        candidate: Candidate,
        chat: _Chat,
        agreement: Agreement,
        token_seconds: float | None,
        full_token_seconds: float | None,
    ) -> Result:
        item, report = prompt.item, chat.report
        if agreement.kl is not None and not math.isfinite(agreement.kl):
            raise MethodError("the logits contain NaN or infinity; the method has corrupted keys or values")
        if report is None:
            raise UnsupportedModeError(f"item {item.number} of {item.task} has no turn")
        turns = tuple(
            TurnResult(
                turn.text, text := self.decoder.text(reply), turn.answer, grade(turn, text), turn.counted, len(reply)
            )
            for turn, reply in zip(item.turns, chat.replies, strict=True)
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
            log_likelihood=prompt.likelihood(full, chat.replies[0]) if item.long else None,
            context=prompt.tokens,
            stored_bytes=totals["stored_bytes"],
            full_bytes=totals["full_bytes"],
            host_bytes=totals["host_bytes"],
            peak_bytes=totals["peak_bytes"],
            evicted=totals["evicted"],
            retrieved=totals["retrieved"],
            hits=sum(layer.hits for layer in report.layers),
            token_seconds=token_seconds,
            prefill_seconds=chat.cache.prefill_seconds,
            full_token_seconds=full_token_seconds,
            details=_details(chat.cache),
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
    """The prompt of an item, read once."""

    def __init__(self, bench: Bench, item: Item) -> None:
        self.bench, self.item, self.decoder = bench, item, bench.decoder
        model, processor = bench.loaded
        self.inputs = build_inputs(processor, item.turns[0].text, item.images, model=model)
        self.tokens = int(self.inputs["input_ids"].shape[1])
        self._recording: Recording | None = None
        self.full = Full()
        self._begun: dict[int, tuple[CompressedCache, Tensor]] = {}
        with contextlib.suppress(UnsupportedModeError):  # then every method reads the prompt itself
            self._recording = record(model, self.inputs)

    def begin(self, method: Method) -> tuple[CompressedCache, Tensor]:
        """A copy of the cache that holds the prompt, and the logits [vocabulary] after it."""
        if id(method) not in self._begun:
            self._begun[id(method)] = self._read(method)
        cache, logits = self._begun[id(method)]
        return copy.deepcopy(cache), logits

    def _read(self, method: Method) -> tuple[CompressedCache, Tensor]:
        options = self.bench.options
        if self._recording is None or not replays(method):
            return read(self.bench.loaded.model, self.inputs, method, **options)
        return replay(self._recording, method, **options), self._recording.logits

    def chat(self, methods: Sequence[Method], *, keep_logits: bool = False) -> list[_Chat]:
        """The conversation with each method's own replies."""
        chats, logits = self._begin(methods)
        for number, turn in enumerate(self.item.turns):
            if number:
                logits = self._ask(chats, turn.text)
            caches = [chat.cache for chat in chats]
            replies, chosen_from = self.decoder.reply_all(caches, logits, turn.max_new_tokens)
            for chat, reply, own in zip(chats, replies, chosen_from, strict=True):
                chat.replies.append(reply)
                chat.report = chat.report or Report.of(chat.cache)
                if keep_logits:
                    chat.logits = [*(chat.logits or []), own]
        return chats

    def follow(
        self, full: _Chat, methods: Sequence[Method], places: Sequence[int], agreements: Sequence[Agreement]
    ) -> list[_Chat]:
        """The conversation with the full cache's replies; adds the methods' predictions to their agreements.

        The first token of the first reply is excluded: it is chosen by the prefill, which attends to the whole prompt
        (it is included for methods that prune tokens in the residual stream).
        """
        chats, logits = self._begin(methods)
        fresh = [Agreement() for _ in methods]
        skip = [replays(method) for method in methods]
        for number, (turn, reply, expected) in enumerate(
            zip(self.item.turns, full.replies, full.logits or [], strict=True)
        ):
            if number:
                logits = self._ask(chats, turn.text)
            for step, (token, wanted) in enumerate(zip(reply, expected, strict=True)):
                judged = [i for i in range(len(chats)) if number or step or not skip[i]]
                if judged:
                    add([fresh[i] for i in judged], wanted, [logits[i].float() for i in judged])
                if step + 1 < len(reply):
                    caches = [chat.cache for chat in chats]
                    logits = [out[-1] for out in self.decoder.feed_all(caches, [[token]] * len(chats))]
            for chat in chats:
                chat.replies.append(list(reply))
                chat.report = chat.report or Report.of(chat.cache)
        for place, agreement in zip(places, fresh, strict=True):
            agreements[place].same, agreements[place].divergences = agreement.same, agreement.divergences
        return chats

    def _begin(self, methods: Sequence[Method]) -> tuple[list[_Chat], list[Tensor]]:
        begun = [self.begin(method) for method in methods]
        return [_Chat(cache, []) for cache, _ in begun], [logits for _, logits in begun]

    def _ask(self, chats: Sequence[_Chat], question: str) -> list[Tensor]:
        """Feeds the next question to all caches; the logits after it."""
        tokens = [self.decoder.follow_up(question, chat.replies[-1][-1]) for chat in chats]
        return [out[-1] for out in self.decoder.feed_all([chat.cache for chat in chats], tokens)]

    def likelihood(self, full: _Chat, reply: list[int]) -> float:
        """Mean log-probability of the tokens of a first reply under the full cache."""
        if reply == full.replies[0] and full.logits is not None:
            logits = torch.stack(full.logits[0])
        else:
            cache, first = self.begin(self.full)
            logits = first.float()[None]
            if len(reply) > 1:
                logits = torch.cat([logits, self.decoder.feed(cache, reply[:-1])])
        chosen = torch.tensor(reply, device=logits.device)[:, None]
        return float(logits.log_softmax(-1).gather(-1, chosen).mean())

    def token_seconds(self, methods: Sequence[Method], reply: Sequence[int]) -> list[float | None]:
        """Medians of the first decode steps over the full cache's reply; None if the reply has one token.

        Methods alternate, so that other load on the machine affects all of them.
        """
        caches = [self.begin(method)[0] for method in methods]
        clocks = [StepClock(self.bench.loaded.model) for _ in methods]
        for token in reply[: min(TIMED, len(reply) - 1)]:
            for cache, clock in zip(caches, clocks, strict=True):
                with clock:
                    self.decoder.feed(cache, [token])
        return [median(clock.seconds) if clock.seconds else None for clock in clocks]


def _drawn(method: Method, item: Item) -> Method:
    """Give a method with a `seed` another one for every item, so that intervals include the variance of the draw."""
    seed = getattr(method, "seed", None)
    if not any(option.name == "seed" for option in fields(method)):
        return method
    return replace(method, **{"seed": zlib.crc32(f"{seed} {item.task} {item.number} {item.seed}".encode())})


def _each(items: Sequence[Any], work: Callable[[Sequence[int]], list[T]]) -> list[T | Exception]:
    """Works on all at once; if that raises, one at a time, so that an error belongs to the item that causes it."""
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

"""One item, several methods: replies, agreement with the full cache, bytes and times."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor

from foveakv.cache import CompressedCache
from foveakv.compare import Candidate
from foveakv.errors import UnsupportedModeError
from foveakv.evaluation.grading import grade
from foveakv.evaluation.items import Item
from foveakv.evaluation.replay import Recording, read, record, replay
from foveakv.evaluation.results import FULL, Result, TurnResult, describe_error
from foveakv.evaluation.speaking import Reply, Speaker
from foveakv.inputs import build_inputs
from foveakv.methods import Method
from foveakv.methods.full import Full
from foveakv.models import Loaded
from foveakv.report import Report


@dataclass
class _Talk:
    """All replies of one conversation, and the cache's report at the end of the first."""

    replies: list[Reply]
    report: Report
    cache: CompressedCache


class Bench:
    """Runs items on one loaded model.

    Args:
        loaded: model and processor.
        backend, kv_dtype: as for `foveakv.compress`.
    """

    def __init__(self, loaded: Loaded, *, backend: str = "auto", kv_dtype: str | None = None) -> None:
        self.loaded = loaded
        self.options = {"backend": backend, "kv_dtype": kv_dtype}
        self.speaker = Speaker(loaded.model, loaded.processor)

    def run(self, item: Item, candidates: Sequence[Candidate]) -> Iterator[Result]:
        """One result per candidate, in their order; where something raises, a result with `error`.

        The prompt is read once; every method then compresses the same recorded prefill (`replay.py`), except where
        that cannot be: then each reads it for itself, with the same outcome.
        """
        try:
            prompt = _Prompt(self, item)
            full = prompt.talk(Full())
        except Exception as error:  # a method may raise anything; the others go on
            for candidate in candidates:
                yield self._failed(item, candidate, error)
            return
        for candidate in candidates:
            try:
                yield self._result(prompt, full, candidate)
            except Exception as error:  # a method may raise anything; the others go on
                yield self._failed(item, candidate, error)

    def _result(self, prompt: _Prompt, full: _Talk, candidate: Candidate) -> Result:
        method, item = candidate.method, prompt.item
        talk = full if method.name == FULL else prompt.talk(method)
        given = talk
        if any(ours.tokens != theirs.tokens for ours, theirs in zip(talk.replies, full.replies, strict=True)):
            given = prompt.talk(method, given=[reply.tokens for reply in full.replies])
        # Who takes tokens out of the residual stream changes what chooses the first token.
        skipped = 1 if method.drop_hidden_after is None else 0
        match, equal, kl, scored = agreement(full.replies, given.replies, skipped)
        turns = tuple(
            TurnResult(
                turn.text, text := self.speaker.text(reply.tokens), turn.answer, grade(turn, text), len(turn.facts),
                len(reply.tokens),
            )
            for turn, reply in zip(item.turns, talk.replies, strict=True)
        )  # fmt: skip
        steps = [seconds for tokens, seconds in talk.cache.steps if tokens == 1]
        totals, report = talk.report.to_dict(), talk.report
        return Result(
            **self._who(item, candidate),
            score=sum(turn.score for turn in turns) / len(turns),
            turns=turns,
            match=match,
            equal=equal,
            kl=kl,
            scored=scored,
            log_likelihood=prompt.likelihood(full, talk) if item.long else None,
            context=prompt.tokens,
            stored_bytes=totals["stored_bytes"],
            full_bytes=totals["full_bytes"],
            host_bytes=totals["host_bytes"],
            peak_bytes=totals["peak_bytes"],
            evicted=totals["evicted"],
            retrieved=totals["retrieved"],
            hits=sum(layer.hits for layer in report.layers),
            token_seconds=median(steps) if steps else None,
            prefill_seconds=talk.cache.prefill_seconds,
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
        self.bench, self.item = bench, item
        model, processor = bench.loaded
        self.inputs = build_inputs(processor, item.turns[0].text, item.images, model=model)
        self.tokens = int(self.inputs["input_ids"].shape[1])
        self._recording: Recording | None = None
        with contextlib.suppress(UnsupportedModeError):  # then every method reads the prompt for itself
            self._recording = record(model, self.inputs)

    def begin(self, method: Method) -> tuple[CompressedCache, Tensor]:
        """A cache that has read the prompt, and the logits [vocabulary] behind it."""
        options = self.bench.options
        if self._recording is None or method.drop_hidden_after is not None:
            return read(self.bench.loaded.model, self.inputs, method, **options)
        return replay(self._recording, method, **options), self._recording.logits

    def talk(self, method: Method, given: Sequence[Sequence[int]] | None = None) -> _Talk:
        """The whole conversation with the method's own replies, or with `given` ones."""
        speaker = self.bench.speaker
        cache, logits = self.begin(method)
        replies: list[Reply] = []
        report: Report | None = None
        for number, turn in enumerate(self.item.turns):
            if number:
                logits = speaker.feed(cache, speaker.follow_up(turn.text, replies[-1].tokens[-1]))[-1]
            if given is None:
                replies.append(speaker.reply(cache, logits, turn.max_new_tokens))
            else:
                replies.append(speaker.repeat(cache, logits, given[number]))
            report = report or Report.of(cache)
        if report is None:
            raise UnsupportedModeError(f"item {self.item.number} of {self.item.task} has no turn")
        return _Talk(replies, report, cache)

    def likelihood(self, full: _Talk, talk: _Talk) -> float:
        """Mean log-probability that the full cache gives to the tokens of the first reply."""
        tokens = talk.replies[0].tokens
        if tokens == full.replies[0].tokens:
            logits = full.replies[0].logits
        else:
            cache, first = self.begin(Full())
            logits = first.float()[None]
            if len(tokens) > 1:
                logits = torch.cat([logits, self.bench.speaker.feed(cache, tokens[:-1])])
        chosen = torch.tensor(tokens, device=logits.device)[:, None]
        return float(logits.log_softmax(-1).gather(-1, chosen).mean())


def agreement(
    full: Sequence[Reply], method: Sequence[Reply], skipped: int = 1
) -> tuple[float, float, float | None, int]:
    """How near a method is to the full cache on the full cache's own replies: match, equal, kl, scored (see `Result`).

    Both hold the logits behind the same tokens. The first `skipped` tokens of the first reply are left out: the first
    one is chosen by the prefill, which sees the whole prompt. Without any other token, match and equal are 1 and kl is
    None.
    """
    same: list[bool] = []
    divergence: list[Tensor] = []
    for turn, (ours, theirs) in enumerate(zip(method, full, strict=True)):
        start = skipped if turn == 0 else 0
        p, q = theirs.logits[start:].double().log_softmax(-1), ours.logits[start:].double().log_softmax(-1)
        divergence.append((p.exp() * (p - q)).sum(-1).clamp_min(0))
        same += (ours.logits[start:].argmax(-1) == theirs.logits[start:].argmax(-1)).tolist()
    if not same:
        return 1.0, 1.0, None, 0
    match = same.index(False) if False in same else len(same)
    return match / len(same), sum(same) / len(same), float(torch.cat(divergence).mean()), len(same)


def _details(cache: CompressedCache) -> dict[str, Any] | None:
    """What a method says about itself; HybridKV's map of static heads, layers x heads."""
    found = dict(cache.method.summary(cache))
    state = cache.state.get("hybridkv")
    if isinstance(state, dict) and isinstance(state.get("static"), Tensor):
        found["static_heads"] = state["static"][0].to(torch.int8).tolist()
    return found or None

"""Tasks and a bench without a model, for tests of the evaluation's runner: results are known, runs are counted.

The plan's `model` is the path of a log: every result that is computed adds its key as a line, so that tests see what
ran and how often.
"""

from __future__ import annotations

import os
import signal
import time
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from foveakv.evaluation import tasks
from foveakv.evaluation.items import Item, Task, Turn
from foveakv.evaluation.plan import Plan, with_baselines
from foveakv.evaluation.results import Result, TurnResult

TASKS = ("fake-a", "fake-b")


def _make(generator: Any) -> tuple[tuple[Any, ...], tuple[Turn, ...]]:
    return (), (Turn("What?", (str(generator.integers(1000)),)),)


def register() -> None:
    for name in TASKS:
        tasks.register(Task(name, f"Nothing, {name}", _make))


def forget() -> None:
    for name in TASKS:
        tasks._REGISTERED.pop(name, None)


def plan(log: Path, count: int = 3, budgets: Sequence[float] = (0.1, 0.2), **options: Any) -> Plan:
    from foveakv.evaluation.compare import candidates

    chosen = with_baselines(candidates(["snapkv", "hae"], budgets))
    return Plan.of(TASKS, chosen, count, model=str(log), **options)


class FakeBench:
    """Scores are a checksum of the key."""

    def __init__(self, log: str, seconds: float = 0.0) -> None:
        self.log, self.seconds = Path(log), seconds

    def run(self, item: Item, candidates: Sequence[Any]) -> Iterator[Result]:
        for candidate in candidates:
            time.sleep(self.seconds)
            with self.log.open("a") as file:
                file.write(f"{item.task} {item.number} {candidate.label}\n")
            yield self.result(item, candidate)

    def result(self, item: Item, candidate: Any) -> Result:
        answer = item.turns[0].answer
        score = zlib.crc32(f"{item.task} {item.number} {candidate.label} {answer}".encode()) / 2**32
        budget = getattr(candidate.method, "budget", None)
        return Result(
            item.task, item.number, item.seed, candidate.method.name, budget, candidate.label,
            candidate.method.describe(), score=score, turns=(TurnResult("What?", "é", answer, score, 1, 3),),
        )  # fmt: skip


class FailingBench(FakeBench):
    """HAE fails, random does not apply to item 0; fake-b's item 1 raises before its first result, item 2 after it."""

    def run(self, item: Item, candidates: Sequence[Any]) -> Iterator[Result]:
        if (item.task, item.number) == ("fake-b", 1):
            raise ValueError("no such item")
        for result in super().run(item, candidates):
            if result.method == "hae":
                yield Result(*list(vars(result).values())[:7], error="MethodError: not today")
            elif result.method == "random" and item.number == 0:
                yield Result(*list(vars(result).values())[:7], error="NoVisualTokensError: random needs a picture")
            else:
                yield result
            if (item.task, item.number) == ("fake-b", 2):
                raise RuntimeError("out of memory")


class DyingBench(FakeBench):
    """The process is killed at item 1 of fake-a: the first time, or always where there is a file LOG.always."""

    def run(self, item: Item, candidates: Sequence[Any]) -> Iterator[Result]:
        died = self.log.with_suffix(".died")
        if (item.task, item.number) == ("fake-a", 1) and (
            not died.exists() or self.log.with_suffix(".always").exists()
        ):
            died.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().run(item, candidates)


def make(plan: Plan) -> FakeBench:
    register()
    return FakeBench(plan.model)


def make_slow(plan: Plan) -> FakeBench:
    register()
    return FakeBench(plan.model, seconds=0.02)


def make_failing(plan: Plan) -> FakeBench:
    register()
    return FailingBench(plan.model)


def make_dying(plan: Plan) -> FakeBench:
    register()
    return DyingBench(plan.model)


def make_none(plan: Plan) -> FakeBench:
    from foveakv.errors import ModelLoadError

    raise ModelLoadError("there is no such model")


def runs(log: Path) -> Counter[str]:
    """How often each result was computed."""
    return Counter(log.read_text().splitlines()) if log.exists() else Counter()

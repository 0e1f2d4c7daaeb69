"""Answers of the engine do not depend on its company, on when prompts are read, or on what fails or goes away."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import gc
import itertools
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import families
import matrix
import pytest
import served
import tiny_folder
import torch

import foveakv
from foveakv import cache_for, methods
from foveakv.engines.transformers import contexts
from foveakv.engines.transformers.cache import CompressedCache
from foveakv.engines.transformers.options import CacheOptions
from foveakv.errors import UnsupportedModelError
from foveakv.serving.choice import Choice, Policy
from foveakv.serving.engine import Delta, Done, Event, Failed, Finished, Generation
from foveakv.serving.errors import ApiError
from foveakv.serving.job import Job
from foveakv.serving.limits import Limits
from foveakv.serving.prompts import PromptReader, stages
from foveakv.serving.roster import Roster
from foveakv.serving.sampling import Sampling
from foveakv.serving.steps import Steps
from foveakv.serving.transformers_engine import TransformersEngine

TOKENS = 8
LIMITS = Limits(max_running=64, max_queue=64)


class Collected:
    """A sink."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.done = threading.Event()

    def __call__(self, event: Event) -> None:
        self.events.append(event)
        if isinstance(event, (Done, Failed)):
            self.done.set()

    def texts(self) -> dict[int, str]:
        """The text of every answer."""
        assert self.done.wait(120)
        assert isinstance(self.events[-1], Done), self.events[-1]
        found: dict[int, str] = {event.index: "" for event in self.events if isinstance(event, Finished)}
        for event in self.events:
            if isinstance(event, Delta):
                found[event.index] += event.text
        return found

    def logprobs(self) -> list[float]:
        return [entry["logprob"] for event in self.events if isinstance(event, Delta) for entry in event.logprobs]


class Eager(TransformersEngine):
    """Decode steps run before every layer of a prompt, however short it is."""

    _step_seconds = property(lambda self: -1.0, lambda self, value: None)  # type: ignore[assignment]


def engine_of(family: str, dtype: torch.dtype = torch.float64, **options: Any) -> TransformersEngine:
    model = families.build(family, dtype=dtype)
    return Eager(model, tiny_folder.tokenizer(), policy=Policy("full"), limits=LIMITS, stall=-1.0, **options)


def generation(family: str, name: Any, seed: int, dtype: torch.dtype = torch.float64, **options: Any) -> Generation:
    method = matrix.method(name) if isinstance(name, str) else name
    inputs = families.prompt(family, 0 if seed % 4 == 3 and name in ("full", "snapkv") else 1 + seed % 2, dtype=dtype,
                             seed=seed, text=9 + 5 * (seed % 3))  # fmt: skip
    return Generation(inputs, Choice(method, CacheOptions(), True), TOKENS, **options)


GREEDY = Sampling(temperature=0)


def alone(engine: TransformersEngine, one: Generation) -> Collected:
    sink = Collected()
    engine.submit(one, sink)
    assert sink.done.wait(120)
    return sink


@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl", "qwen3_vl", "gemma3"])
def test_greedy_and_sampled_answers_in_company(family: str) -> None:
    whole, chunked = engine_of(family, chunk=None), engine_of(family, chunk=16)
    names = []
    for name in matrix.METHODS:
        with contextlib.suppress(UnsupportedModelError):
            foveakv.cache_for(whole.model, matrix.method(name))
            names.append(name)
    cases = [
        generation(
            family, name, seed, choices=1 + seed % 2,
            sampling=GREEDY if seed % 3 else Sampling(temperature=1.3, top_p=0.9, seed=seed),
        )
        for seed, name in enumerate(names)
    ]  # fmt: skip
    expected = [alone(whole, case).texts() for case in cases]
    counted: list[int] = []
    decode = chunked._decode

    def counting(inside: bool = False) -> None:
        counted.append(sum(1 for job, _ in chunked.answering() if chunked._reading not in (None, job)))
        decode(inside)

    chunked._decode = counting  # type: ignore[method-assign]
    sinks = [Collected() for _ in cases]
    for case, sink in zip(cases, sinks, strict=True):
        chunked.submit(case, sink)
    assert [sink.texts() for sink in sinks] == expected
    assert max(counted) > 1  # answers went on while a prompt was read
    assert chunked.status().stored_bytes == chunked.status().reserved_bytes == chunked.status().running == 0
    whole.close()
    chunked.close()


def test_log_probabilities_in_single_precision() -> None:
    cases = [
        generation("llava", name, seed, torch.float32, logprobs=0, sampling=GREEDY)
        for seed, name in enumerate(["full", "snapkv", "h2o", "hybridkv", "hae"])
    ]
    engine = engine_of("llava", torch.float32)
    expected = [alone(engine, case).logprobs() for case in cases]
    sinks = [Collected() for _ in cases]
    for case, sink in zip(cases, sinks, strict=True):
        engine.submit(case, sink)
    for sink, wanted in zip(sinks, expected, strict=True):
        sink.texts()
        assert sink.logprobs() == pytest.approx(wanted, abs=1e-4)
    engine.close()


@pytest.mark.parametrize("chunk", [None, 8])
def test_a_model_whose_steps_cannot_be_joined(chunk: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if "qwen3_5" not in families.FAMILIES:
        pytest.skip("this transformers has no such model")
    cases = [generation("qwen3_5", name, 3 - seed, sampling=GREEDY) for seed, name in enumerate(["snapkv", "full"])]
    engine = engine_of("qwen3_5", chunk=chunk)
    expected = [alone(engine, case).texts() for case in cases]
    monkeypatch.setattr(contexts, "begin_block", None)  # decode steps between chunks are no blocks
    sinks = [Collected() for _ in cases]
    for case, sink in zip(cases, sinks, strict=True):
        engine.submit(case, sink)
    assert [sink.texts() for sink in sinks] == expected
    engine.close()


@pytest.mark.usefixtures("no_gradients")
def test_caches_that_cannot_be_joined_leave_the_others_together() -> None:
    """With preallocated slots a cache has passes of its own; the logits are those of each cache alone."""
    model = families.build("llava", dtype=torch.float64)
    steps, sizes = Steps(model), []
    own = [cache_for(model, matrix.method("snapkv"), preallocate=8 if number == 1 else None) for number in range(3)]
    for number, cache in enumerate(own):
        model(**families.prompt("llava", 1, seed=number), past_key_values=cache)
    other = [copy.deepcopy(cache) for cache in own]
    handle = model.register_forward_pre_hook(
        lambda module, args, given: sizes.append(len(given["input_ids"])), with_kwargs=True
    )
    together = steps.run(own, [5, 6, 7])
    assert sizes == [2, 1]
    handle.remove()
    for cache, token, got in zip(other, [5, 6, 7], together, strict=True):
        (alone,) = steps.run([cache], [token])
        assert isinstance(got, torch.Tensor), got
        assert torch.allclose(got, alone, atol=1e-6)  # type: ignore[arg-type]


@dataclasses.dataclass
class FailsLater(methods.find("h2o")):  # type: ignore[misc]
    """Fails at a decode step."""

    after: int = 0

    def decode(self, view: Any) -> Any:
        if view.compressed_idx == 1 and view.seen > view.request.prompt.columns + self.after:
            raise ArithmeticError("no")
        return super().decode(view)


def test_a_request_that_fails_while_others_go_on() -> None:
    engine = engine_of("llava")
    cases = [generation("llava", name, 1, sampling=GREEDY) for name in ("snapkv", "hae")]
    expected = [alone(engine, case).texts() for case in cases]
    bad = generation("llava", FailsLater(budget=0.5, after=3), 1, sampling=GREEDY, choices=2)
    sinks = [Collected() for _ in range(3)]
    for case, sink in zip([cases[0], bad, cases[1]], sinks, strict=True):
        engine.submit(case, sink)
    assert [sinks[0].texts(), sinks[2].texts()] == expected
    assert sinks[1].done.wait(60)
    last = sinks[1].events[-1]
    assert isinstance(last, Failed)
    assert last.error.status == 500
    assert "ArithmeticError" in str(last.error)
    assert engine.status().stored_bytes == 0
    engine.close()


def caches() -> int:
    gc.collect()
    return sum(isinstance(each, CompressedCache) for each in gc.get_objects())


@pytest.mark.parametrize("why", ["cancelled", "late", "closed"])
def test_a_prompt_that_is_given_up_while_it_is_read(why: str) -> None:
    engine, before = engine_of("qwen2_5_vl"), caches()
    pause, at = engine._pause, []

    def stopping(inside: bool) -> None:
        job = engine._reading
        assert job is not None
        at.append(job)
        if len(at) == 3:
            if why == "cancelled":
                engine.cancel(job)
            elif why == "late":
                job.deadline = 0.0
            else:
                engine._roster.close()
        pause(inside)

    engine._pause = stopping  # type: ignore[method-assign]
    sink = Collected()
    engine.submit(generation("qwen2_5_vl", "snapkv", 1, sampling=GREEDY), sink)
    if why == "cancelled":
        assert served.eventually(lambda: engine.status().running == 0 and len(at) >= 3)
        assert sink.events == []
        assert alone(engine, generation("qwen2_5_vl", "snapkv", 1, sampling=GREEDY)).texts()
    else:
        assert sink.done.wait(60)
        last = sink.events[-1]
        assert isinstance(last, Failed)
        assert last.error.status == (504 if why == "late" else 503)
    engine.close()
    assert served.eventually(lambda: caches() <= before)
    del at[:]


def test_images_and_the_text_before_them_are_one_chunk() -> None:
    family = "qwen2_5_vl"
    reader = PromptReader(families.build(family), 8)
    inputs = families.prompt(family, 2)
    total = inputs["input_ids"].shape[1]
    ends = reader.ends(inputs, methods.get("snapkv"))
    last = int((inputs["input_ids"][0] == families.IMAGE).nonzero()[-1])
    assert ends[0] > last
    assert ends[-1] == total
    assert all(0 < b - a <= 8 for a, b in itertools.pairwise(ends))
    text = families.prompt(family, 0, text=30)
    assert reader.ends(text, methods.get("snapkv"))[0] == 8
    assert reader.ends(inputs, methods.get("fastv", drop_hidden_states=True)) == [total]
    assert PromptReader(families.build(family)).ends(inputs, methods.get("snapkv")) == [total]
    padded = families.batch(family).inputs
    assert len(reader.ends({key: value[1:2] for key, value in padded.items()}, methods.get("snapkv"))) == 1


def test_stages_are_layers_of_the_towers_and_the_decoder() -> None:
    model = families.build("qwen2_5_vl")
    names = {type(module).__name__ for module in stages(model)}
    assert {"Qwen2_5_VLDecoderLayer", "Qwen2_5_VLVisionBlock"} <= names


# ---- the queue


def job(needed: int, choices: int = 1, seconds: float = 100.0) -> Job:
    inputs = {"input_ids": torch.zeros(1, 3, dtype=torch.long)}
    one = Generation(inputs, Choice(methods.get("full"), CacheOptions(), True), 4, choices=choices)
    made = Job(one, lambda event: None, needed, 0.0)
    made.deadline = made.submitted + seconds
    return made


@pytest.fixture
def roster() -> Iterator[Roster]:
    made = Roster(Limits(max_queue=3, max_running=4), 100)
    yield made
    made.close()


def test_no_request_overtakes_another(roster: Roster) -> None:
    first, large, small = job(60), job(50), job(10)
    for each in (first, large, small):
        roster.add(each, True)
    assert roster.next() is first
    assert roster.next() is None  # `small` would fit
    assert roster.free() == 40
    roster.remove(first)
    assert roster.next() is large
    assert roster.next() is small
    assert roster.status(True).running == 2
    assert roster.status(True).reserved_bytes == 60


def test_a_request_larger_than_was_estimated_runs_alone(roster: Roster) -> None:
    large = job(1000)
    roster.add(large, True)
    assert roster.next() is large
    assert roster.free() == -900


def test_answers_are_bounded_and_so_is_the_queue(roster: Roster) -> None:
    for count in (3, 2, 1):
        roster.add(job(1, choices=count), True)
    with pytest.raises(ApiError, match="3 requests are waiting"):
        roster.add(job(1), True)
    assert roster.next() is not None
    assert roster.next() is None
    roster.close()
    with pytest.raises(ApiError, match="shutting down"):
        roster.add(job(1), True)


def test_requests_leave_the_queue(roster: Roster) -> None:
    waiting, late = job(1), job(1, seconds=-1)
    for each in (waiting, late):
        roster.add(each, True)
    assert roster.late() == [late]
    assert roster.withdraw(waiting)
    assert not roster.withdraw(waiting)
    assert roster.status(True).queue == 0
    assert roster.clear() == []


def test_a_request_that_has_ended_holds_nothing() -> None:
    engine = engine_of("llava")
    one = generation("llava", "snapkv", 1, sampling=GREEDY)
    held = weakref.ref(one)
    alone(engine, one)
    del one
    gc.collect()
    assert served.eventually(lambda: held() is None)
    engine.close()

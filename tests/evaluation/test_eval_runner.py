"""Runs of a plan with a bench that needs no model: stopped, killed, failing, on several workers, by command line."""

from __future__ import annotations

import importlib.util
import json
import multiprocessing
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import fake_bench
import pytest

from foveakv.errors import InputError, MissingDependencyError, ModelLoadError
from foveakv.evaluation.ray_pool import share
from foveakv.evaluation.results import Result
from foveakv.evaluation.runner import Status, run
from foveakv.evaluation.store import read_results

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _fake_tasks() -> Iterator[None]:
    fake_bench.register()
    yield
    fake_bench.forget()


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "log"


def found(folder: Path) -> dict[Any, Result]:
    return {result.key: result for result in read_results(folder)}


def expected(tmp_path: Path, plan: Any) -> dict[Any, Result]:
    """What an uninterrupted run in this process gives."""
    whole = replace(plan, model=str(tmp_path / "other log"))
    run(whole, tmp_path / "whole", factory=fake_bench.make)
    return found(tmp_path / "whole")


# ---- one worker


def test_a_run_has_all_results_and_needs_no_ray(tmp_path: Path, log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)  # an import would raise
    plan, seen = fake_bench.plan(log), list[Status]()
    status = run(plan, tmp_path / "run", factory=fake_bench.make, progress=seen.append)
    assert status == Status(results=42, total=42, items=6, total_items=6, failed=0)
    assert seen[0] == Status(0, 42, 0, 6, 0)
    assert seen[8] == Status(8, 42, 1, 6, 0)
    assert len(seen) == 43
    assert list(found(tmp_path / "run")) == list(plan.keys())
    assert [path.name for path in (tmp_path / "run" / "results").iterdir()] == ["worker-0.jsonl"]
    (start,) = json.loads((tmp_path / "run" / "run.json").read_text())["starts"]
    assert start["machines"][0]["versions"]["torch"]


def test_the_same_call_again_does_nothing(tmp_path: Path, log: Path) -> None:
    plan = fake_bench.plan(log)
    first = run(plan, tmp_path / "run", factory=fake_bench.make)
    assert run(plan, tmp_path / "run", factory=fake_bench.make_none) == first


@pytest.mark.parametrize("stop", [0, 1, 6, 7, 8, 41])
def test_stopped_and_gone_on_with_is_uninterrupted(tmp_path: Path, log: Path, stop: int) -> None:
    plan = fake_bench.plan(log)

    def interrupt(status: Status) -> None:
        if status.results == stop:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(plan, tmp_path / "run", factory=fake_bench.make, progress=interrupt)
    assert len(found(tmp_path / "run")) == stop
    run(plan, tmp_path / "run", factory=fake_bench.make)
    assert found(tmp_path / "run") == expected(tmp_path, plan)
    assert set(fake_bench.runs(log).values()) == {1}


def test_a_larger_plan_runs_what_it_adds(tmp_path: Path, log: Path) -> None:
    small, large = fake_bench.plan(log, 2, budgets=[0.1]), fake_bench.plan(log, 3, budgets=[0.05, 0.1])
    run(small, tmp_path / "run", factory=fake_bench.make)
    seen: list[Status] = []
    run(large, tmp_path / "run", factory=fake_bench.make, progress=seen.append)
    assert seen[0] == Status(results=16, total=42, items=0, total_items=6, failed=0)
    assert found(tmp_path / "run") == expected(tmp_path, large)
    assert set(fake_bench.runs(log).values()) == {1}
    with pytest.raises(InputError, match=r"items were 3 and are now 2; missing methods: snapkv 0\.05"):
        run(small, tmp_path / "run", factory=fake_bench.make)


@pytest.mark.skipif(sys.platform != "linux", reason="forks this process, which is loaded already")
def test_killed_and_gone_on_with_is_uninterrupted(tmp_path: Path, log: Path) -> None:
    """kill -9 in the middle: only what was being computed runs twice."""
    folder, plan = tmp_path / "run", fake_bench.plan(log)
    child = multiprocessing.get_context("fork").Process(
        target=run, args=(plan, folder), kwargs={"factory": fake_bench.make_slow}
    )
    child.start()
    try:
        deadline = time.monotonic() + 60
        while sum(fake_bench.runs(log).values()) < 10:
            assert child.is_alive()
            assert time.monotonic() < deadline
            time.sleep(0.005)
    finally:
        child.kill()
        child.join()
    assert child.exitcode == -signal.SIGKILL
    before = found(folder)
    assert 9 <= len(before) < 42
    with next((folder / "results").iterdir()).open("a") as file:
        file.write('{"task": "fake-a", "it')  # and it was writing
    run(plan, folder, factory=fake_bench.make)
    after = found(folder)
    assert after == expected(tmp_path, plan)
    assert sum(fake_bench.runs(log).values()) <= 43
    assert {key: after[key] for key in before} == before


def test_errors_stay_with_their_items(tmp_path: Path, log: Path) -> None:
    plan = fake_bench.plan(log)
    status = run(plan, tmp_path / "run", factory=fake_bench.make_failing)
    errors = {key: result.error for key, result in found(tmp_path / "run").items() if result.error}
    # fake-b: item 1 fails whole, item 2 after its first result; everywhere else 2 results of hae fail.
    assert status == Status(42, 42, 6, 6, failed=7 + 6 + 4 * 2, skipped=2 * 2)
    assert len(errors) == 25
    assert errors["fake-a", 0, 0, "hae 0.1"] == "MethodError: not today"
    assert re.fullmatch(r"ValueError: no such item \(fake_bench\.py, line \d+\)", errors["fake-b", 1, 0, "full"] or "")
    assert ("fake-b", 2, 0, "full") not in errors
    failed = found(tmp_path / "run")["fake-b", 1, 0, "hae 0.1"]
    assert (failed.method, failed.budget, failed.settings["method"]) == ("hae", 0.1, "hae")
    # They are done, unless they are asked for again.
    assert run(plan, tmp_path / "run", factory=fake_bench.make_none) == status
    seen: list[Status] = []
    run(plan, tmp_path / "run", factory=fake_bench.make, retry_failed=True, progress=seen.append)
    assert seen[0] == Status(21, 42, 0, 6, 0, skipped=4)
    assert seen[-1] == Status(42, 42, 6, 6, 0, skipped=4)
    left = {key: result for key, result in found(tmp_path / "run").items() if result.error is None}
    assert len(left) == 38
    whole = expected(tmp_path, plan)
    assert left == {key: whole[key] for key in left}


def test_a_bench_that_gives_too_little_is_noted(tmp_path: Path, log: Path) -> None:
    class Silent:
        def run(self, item: Any, candidates: Any) -> Iterator[Result]:
            return iter(())

    status = run(fake_bench.plan(log, 1), tmp_path / "run", factory=lambda plan: Silent())
    assert status.failed == status.total == 14
    assert {result.error for result in read_results(tmp_path / "run")} == {"the bench gave no result"}


def test_what_cannot_be_written_down_is_a_failure_that_counts(tmp_path: Path, log: Path) -> None:
    class Babbling(fake_bench.FakeBench):
        def run(self, item: Any, candidates: Any) -> Iterator[Result]:
            for result in super().run(item, candidates):
                yield replace(result, details={"x": object()}) if result.method == "hae" else result

    plan = fake_bench.plan(log, 1)
    status = run(plan, tmp_path / "run", factory=lambda plan: Babbling(str(log)))
    failed = [result for result in read_results(tmp_path / "run") if result.error]
    assert status.failed == len(failed) == 4
    assert {result.method for result in failed} == {"hae"}
    assert "cannot be written as JSON: TypeError" in (failed[0].error or "")
    assert run(plan, tmp_path / "run", factory=fake_bench.make_none) == status


def test_mistakes(tmp_path: Path, log: Path) -> None:
    plan = fake_bench.plan(log)
    with pytest.raises(InputError, match="workers must be at least 1"):
        run(plan, tmp_path / "run", workers=0)
    with pytest.raises(InputError, match="unknown task 'nothing'"):
        run(replace(plan, tasks=("nothing",)), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    with pytest.raises(ModelLoadError):
        run(plan, tmp_path / "run", factory=fake_bench.make_none)


# ---- several workers


def test_without_ray_the_message_says_what_to_install(
    tmp_path: Path, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'foveakv\[eval\]'"):
        run(fake_bench.plan(log), tmp_path / "run", workers=2, ray_address="auto", factory=fake_bench.make)


@pytest.fixture
def _no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)


@pytest.mark.slow
@pytest.mark.usefixtures("_no_ray")
def test_without_ray_workers_are_processes_of_this_machine(tmp_path: Path, log: Path) -> None:
    plan = fake_bench.plan(log, 6)
    assert run(plan, tmp_path / "run", workers=2, factory=fake_bench.make_slow) == Status(84, 84, 12, 12, 0)
    assert found(tmp_path / "run") == expected(tmp_path, plan)
    assert set(fake_bench.runs(log).values()) == {1}
    assert 1 <= len(list((tmp_path / "run" / "results").iterdir())) <= 2


@pytest.mark.slow
@pytest.mark.usefixtures("_no_ray")
def test_a_process_that_dies_ends_the_run_which_resumes(tmp_path: Path, log: Path) -> None:
    plan = fake_bench.plan(log)
    with pytest.raises(InputError, match="a worker process died"):
        run(plan, tmp_path / "run", workers=2, factory=fake_bench.make_dying)
    assert run(plan, tmp_path / "run", workers=2, factory=fake_bench.make_dying).failed == 0
    assert found(tmp_path / "run") == expected(tmp_path, plan)


@pytest.mark.usefixtures("_no_ray")
def test_a_model_that_does_not_load_is_the_same_error_in_a_process(tmp_path: Path, log: Path) -> None:
    with pytest.raises(ModelLoadError, match="there is no such model"):
        run(fake_bench.plan(log), tmp_path / "run", workers=2, factory=fake_bench.make_none)


def test_threads_and_devices_are_shared_out() -> None:
    assert share(8, 0, 3, None) == {"threads": 2, "asked": {"num_cpus": 2}}
    assert share(2, 0, 4, None) == {"threads": 1, "asked": {"num_cpus": 0.5}}
    assert share(16, 2, 2, None) == {"threads": 8, "asked": {"num_cpus": 8, "num_gpus": 1}}
    assert share(16, 1, 3, "cuda")["asked"]["num_gpus"] == 0.33
    assert "num_gpus" not in share(16, 2, 2, "cpu")["asked"]


needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")


@pytest.fixture(scope="module")
def _ray() -> Iterator[None]:
    """One Ray for several tests; its processes find the tests' modules."""
    import ray

    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(ROOT / "src"), str(ROOT / "tests" / "helpers"), *([before] if before else [])]
    )
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    try:
        ray.init(
            address="local", num_cpus=2, include_dashboard=False, object_store_memory=100 * 2**20, log_to_driver=False,
            logging_level="ERROR",
        )  # fmt: skip
    finally:
        os.environ.pop("PYTHONPATH")
        if before is not None:
            os.environ["PYTHONPATH"] = before
    yield
    ray.shutdown()


@needs_ray
@pytest.mark.slow
@pytest.mark.usefixtures("_ray")
def test_two_workers_are_one_worker(tmp_path: Path, log: Path) -> None:
    plan = fake_bench.plan(log, 6)
    status = run(plan, tmp_path / "run", workers=2, factory=fake_bench.make_slow)
    assert status == Status(84, 84, 12, 12, 0)
    assert found(tmp_path / "run") == expected(tmp_path, plan)
    assert set(fake_bench.runs(log).values()) == {1}
    (start,) = json.loads((tmp_path / "run" / "run.json").read_text())["starts"]
    assert start["machines"][0]["threads"] == 1
    assert len(list((tmp_path / "run" / "results").iterdir())) == 2


@needs_ray
@pytest.mark.slow
@pytest.mark.usefixtures("_ray")
def test_a_worker_that_dies_is_replaced(tmp_path: Path, log: Path) -> None:
    plan = fake_bench.plan(log)
    assert run(plan, tmp_path / "run", workers=2, factory=fake_bench.make_dying).failed == 0
    assert log.with_suffix(".died").exists()
    assert found(tmp_path / "run") == expected(tmp_path, plan)
    assert set(fake_bench.runs(log).values()) == {1}


@needs_ray
@pytest.mark.slow
@pytest.mark.usefixtures("_ray")
def test_an_item_that_kills_every_worker_is_an_error(tmp_path: Path, log: Path) -> None:
    log.with_suffix(".always").touch()
    plan = fake_bench.plan(log)
    status = run(plan, tmp_path / "run", workers=2, factory=fake_bench.make_dying)
    assert status == Status(42, 42, 6, 6, failed=7)
    failed = [result for result in read_results(tmp_path / "run") if result.error]
    assert {(result.task, result.item) for result in failed} == {("fake-a", 1)}
    assert "the worker died 2 times while running this item" in (failed[0].error or "")


@needs_ray
@pytest.mark.slow
@pytest.mark.usefixtures("_ray")
def test_a_model_that_does_not_load_is_the_same_error_with_ray(tmp_path: Path, log: Path) -> None:
    with pytest.raises(ModelLoadError, match="there is no such model"):
        run(fake_bench.plan(log), tmp_path / "run", workers=2, factory=fake_bench.make_none)
    with pytest.raises(InputError, match="pass cuda as the device"):
        run(replace(fake_bench.plan(log), device="cuda:1"), tmp_path / "other", workers=2)

"""`kernels.prepare`: what has to be built is built before a measured step begins."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import families
import pytest
import torch

import foveakv
from foveakv import kernels
from foveakv.errors import MethodError
from foveakv.kernels import build, cpu_columns

BUILD_SECONDS = 1000.0


@pytest.fixture
def first_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A process with an empty cache folder, a clock that only `wait` moves, and a build that takes BUILD_SECONDS.

    `builds`: how often it was built. `state.fails`: whether the build raises.
    """
    state = SimpleNamespace(now=0.0, builds=0, fails=False)
    build.KERNEL.problem()  # the real one, which the fixture hides and the slow build returns
    library = build.KERNEL.loaded

    def slow_build() -> Path:
        state.now += BUILD_SECONDS
        state.builds += 1
        if state.fails or library is None:
            raise build.BuildError("there is no C++ compiler")
        return tmp_path / "kernel.so"

    monkeypatch.setenv("FOVEAKV_CACHE", str(tmp_path))
    monkeypatch.setattr(build, "build", slow_build)
    monkeypatch.setattr(build, "load", lambda path: library)
    monkeypatch.setattr(build.KERNEL, "_library", None)
    monkeypatch.setattr(build.KERNEL, "_reason", None)
    monkeypatch.setattr(build.KERNEL, "path", None)
    monkeypatch.setattr(time, "perf_counter", lambda: state.now)
    return state


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("method", ["full", "snapkv", "hybridkv", "h2o"])
def test_no_report_counts_the_build(first_run: SimpleNamespace, method: str, fails: bool) -> None:
    first_run.fails = fails
    model = families.build("qwen2_5_vl")
    options = {} if method == "full" else {"budget": 0.5}
    if method == "hybridkv":
        options = {"budget": 0.5, "preset": "small"}
    with foveakv.compress(model, foveakv.methods.get(method, **options)) as session:
        model.generate(**families.prompt("qwen2_5_vl"), max_new_tokens=2, do_sample=False)
    assert first_run.builds == 1
    assert session.report.prefill_seconds == 0
    assert session.report.token_seconds == 0


@pytest.mark.skipif(build.KERNEL.problem() is not None, reason="no CPU kernel here")
@pytest.mark.parametrize(
    ("options", "used"),
    [({}, True), ({"preallocate": 4}, True), ({"backend": "cpu"}, True), ({"backend": "blocks"}, False)],
)
def test_the_first_request_computes_as_the_second(
    first_run: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], used: bool
) -> None:
    """The library is loaded before the prompt is read, and `blocks` does not use it because another request did."""
    calls, add = [], cpu_columns.add

    def counted(*arguments: Any) -> None:
        calls.append(arguments)
        add(*arguments)

    monkeypatch.setattr(cpu_columns, "add", counted)
    model, made = families.build("qwen2_5_vl"), []
    for _ in range(2):
        calls.clear()
        with foveakv.compress(model, foveakv.methods.get("snapkv", budget=0.5), **options):
            model.generate(**families.prompt("qwen2_5_vl"), max_new_tokens=2, do_sample=False)
        made.append(len(calls))
        kernels.prepare("cpu")  # another request, of any backend
    assert made[0] == made[1]
    assert bool(made[0]) == used


def test_it_builds_once_and_only_where_it_is_used(first_run: SimpleNamespace) -> None:
    kernels.prepare("cpu", itemsize=8)
    kernels.prepare("meta")
    kernels.prepare("cpu", backend="blocks")
    kernels.prepare("cpu", backend="reference")
    assert first_run.builds == 0
    for _ in range(3):
        kernels.prepare(torch.device("cpu"))
    assert first_run.builds == 1


def test_a_backend_that_cannot_be_used_is_an_error_before_the_prompt_is_read(first_run: SimpleNamespace) -> None:
    first_run.fails = True
    with pytest.raises(MethodError, match=r"cpu backend is not available: there is no C.. compiler; choose"):
        kernels.prepare("cpu", backend="cpu")
    with pytest.raises(MethodError, match="no attention backend 'fast'; choose 'auto' or one of"):
        kernels.prepare("cpu", backend="fast")
    model = families.build("qwen2_5_vl")
    with (
        foveakv.compress(model, foveakv.methods.get("full"), backend="cpu"),
        pytest.raises(MethodError, match="cpu backend is not available"),
    ):
        model.generate(**families.prompt("qwen2_5_vl"), max_new_tokens=1)

"""`foveakv eval run` on the command line, with a bench that needs no model."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fake_bench
import pytest
import typer.main
from typer.core import TyperGroup
from typer.testing import CliRunner

from foveakv.cli import app
from foveakv.cli.settings import parse_candidate
from foveakv.errors import FoveaKVError, MethodError
from foveakv.evaluation import runner
from foveakv.evaluation.runner import Status, run
from foveakv.evaluation.store import read_plan

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _fake_tasks() -> Iterator[None]:
    fake_bench.register()
    yield
    fake_bench.forget()


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "log"


@pytest.fixture
def _fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command runs with the bench without a model."""

    def fake(*args: Any, **kwargs: Any) -> Status:
        return run(*args, **kwargs, factory=fake_bench.make)

    monkeypatch.setattr(runner, "run", fake)


def command(*args: Any) -> Any:
    return CliRunner().invoke(app, ["eval", "run", *map(str, args)])


@pytest.mark.usefixtures("_fakes")
def test_command(tmp_path: Path, log: Path) -> None:
    args = (
        "--tasks", "fake-b,fake-a", "--methods", "hae,hybridkv", "--budgets", "0.1,64", "--items", 2, "--seed", 4,
        "--set", "hybridkv.window=8", "--set", "random.seed=3", "--out", tmp_path / "run", "--model", log,
        "--candidate", "static=hybridkv:classify=all_static", "--candidate", "one=hae:budget=0.3,dap=false",
    )  # fmt: skip
    result = command(*args)
    assert result.exit_code == 0, result.output
    assert "44 results" in result.stdout
    assert "0 of 44 results, 0 of 4 items" in result.stderr
    plan = read_plan(tmp_path / "run")
    assert (plan.tasks, plan.items, plan.seed, plan.model) == (("fake-b", "fake-a"), 2, 4, str(log))
    assert [entry.label for entry in plan.entries] == [
        "full", "hae 0.1", "hae 64", "hybridkv 0.1", "hybridkv 64", "static 0.1", "static 64", "one", "random 0.1",
        "random 64", "random 0.3",
    ]  # fmt: skip
    assert plan.entry("hybridkv 64").settings["window"] == 8
    assert plan.entry("static 64").settings["classify"] == "all_static"
    assert plan.entry("one").settings["dap"] is False
    assert plan.entry("random 0.3").settings["seed"] == 3
    assert command(*args).exit_code == 0
    assert set(fake_bench.runs(log).values()) == {1}
    refused = command(*args[:-2], "--seed", 5)
    assert refused.exit_code == 2
    assert "seed was 4 and is now 5; missing methods: one" in refused.stderr


def test_command_says_what_failed(tmp_path: Path, log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "run", lambda *a, **k: run(*a, **k, factory=fake_bench.make_failing))
    args = ("--tasks", "fake-a", "--methods", "hae", "--budgets", "0.1", "--items", 2, "--out", tmp_path / "run",
            "--model", log)  # fmt: skip
    result = command(*args)
    assert result.exit_code == 1
    assert "6 results, 2 of them failed" in result.stdout
    assert "1 do not apply" in result.stdout
    assert "random" not in result.stdout
    assert "2 x hae 0.1: MethodError: not today" in result.stdout
    monkeypatch.setattr(runner, "run", lambda *a, **k: run(*a, **k, factory=fake_bench.make))
    assert command(*args).exit_code == 1
    assert command(*args, "--retry-failed").exit_code == 0


def test_command_stopped(tmp_path: Path, log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*args: Any, **kwargs: Any) -> Status:
        raise KeyboardInterrupt

    monkeypatch.setattr(runner, "run", stopped)
    result = command("--tasks", "fake-a", "--out", tmp_path / "run", "--model", log)
    assert result.exit_code == 130
    assert "the same command resumes the run" in result.stderr


def test_candidates_by_name() -> None:
    one, two = parse_candidate("all static=hybridkv:classify=all_static, window=8", ["0.1", "64"])
    assert (one.label, two.label) == ("all static 0.1", "all static 64")
    assert vars(one.method)["classify"] == "all_static"
    assert [each.label for each in parse_candidate("x=fastv", ["0.1"])] == ["x"]
    for text, words in (
        ("hybridkv:classify=all_static", "is not of the form"),
        ("x=", "is not of the form"),
        ("x=hybridkw", "did you mean 'hybridkv'"),
        ("x=hybridkv:clasify=auto", "--candidate x: hybridkv has no option 'clasify'"),
        ("x=hybridkv:window=many", "--candidate x: window=many: expected 'auto' or a whole number"),
    ):
        with pytest.raises(MethodError, match=words):
            parse_candidate(text)


@pytest.mark.usefixtures("_fakes")
@pytest.mark.parametrize("args", [
    ["--tasks", "nothing"], ["--tasks", ","], ["--suite", "nothing"], ["--methods", "nothing"], ["--budgets", "most"],
    ["--candidate", "full=hae:budget=0.1"], ["--candidate", "hae 0.1=hae:budget=0.1"], ["--set", "window=8"],
    ["--workers", "2", "--device", "cuda:0"],
])  # fmt: skip
def test_mistakes_on_the_command_line(tmp_path: Path, args: list[str]) -> None:
    if "--workers" in args:
        pytest.importorskip("ray")
    result = command("--out", tmp_path / "run", *args)
    assert result.exit_code == 2
    assert result.stderr.count("error: ") == 1, result.output


def test_options_and_examples_are_documented() -> None:
    page, guide = (ROOT / "docs/cli.md").read_text(), (ROOT / "docs/evaluation.md").read_text()
    group = typer.main.get_command(app)
    assert isinstance(group, TyperGroup)
    evaluation = group.commands["eval"]
    assert isinstance(evaluation, TyperGroup)
    names = {name for option in evaluation.commands["run"].params for name in option.opts if name.startswith("--")}
    assert [name for name in sorted(names) if name not in page] == []
    lines = [line for line in guide.splitlines() if line.startswith("foveakv eval run ")]
    assert lines
    for line in lines:
        words = shlex.split(line)
        assert {word for word in words if word.startswith("--")} <= names, line
        evaluation.commands["run"].make_context("run", words[3:])
    with pytest.raises(FoveaKVError):
        parse_candidate("=")

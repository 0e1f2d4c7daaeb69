"""`tune --search`: which settings are tried, which are chosen, and what is said about the default."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import typer
from command_lines import error_of, given, invoke
from typer.core import TyperGroup

from foveakv.cli import app
from foveakv.errors import InputError, MethodError
from foveakv.evaluation import grids
from foveakv.evaluation.items import Item, Turn
from foveakv.evaluation.results import Result, TurnResult
from foveakv.evaluation.search import Search, search_prompts
from foveakv.methods import find, get
from foveakv.util.values import field_types


def test_every_value_of_the_grids_is_valid() -> None:
    for name, grid in grids.GRIDS.items():
        known = field_types(find(name))
        for option, values in grid.items():
            assert option in known, f"{name}.{option}"
            assert len(set(values)) == len(values) > 1
            if name != "sparsemm":  # needs a file of head scores
                for value in values:
                    get(name, **{option: value})


def test_settings_are_different_and_repeatable() -> None:
    found = grids.settings("snapkv", 8)
    assert len(found) == 8
    assert found[0] == {}
    assert len({tuple(sorted(own.items())) for own in found}) == 8
    assert grids.settings("snapkv", 8) == found != grids.settings("snapkv", 8, seed=1)
    assert all(own["window"] == 6 for own in grids.settings("snapkv", 5, fixed={"window": 6}))
    assert len(grids.settings("streaming", 8)) == 4
    assert grids.settings("full", 8) == [{}]
    assert "sparsemm" not in grids.searchable()


class Fake:
    """A bench in which a value is best, and one raises."""

    def __init__(self, best: int = 4, fails: int = -1) -> None:
        self.best, self.fails = best, fails

    def run(self, item: Item, candidates: Sequence[Any]) -> Iterator[Result]:
        for each in candidates:
            sink = each.method.sink
            who = (item.task, item.number, 0, each.method.name, each.method.budget, each.label, {})
            if sink == self.fails:
                yield Result(*who, error="MethodError: no room")
                continue
            equal = 0.9 if sink == self.best else 0.5
            turns = (TurnResult("?", "", "", 0.0, 0, 3),)
            yield Result(*who, score=0.0, turns=turns, equal=equal, kl=1 - equal, scored=3)


PROMPTS = [Item("prompts", n, 0, (), (Turn("?", ()),)) for n in range(6)]


def test_the_best_by_agreement() -> None:
    """The default of streaming is 4: with another best value it is 40 points below it."""
    search = Search(["streaming"], [0.1, 0.2], 4)
    same = search_prompts(search, Fake(best=4), PROMPTS)  # type: ignore[arg-type]
    assert [(one.budget, one.options, one.close, one.tried) for one in same] == [(0.1, {}, True, 4), (0.2, {}, True, 4)]
    other = search_prompts(search, Fake(best=16), PROMPTS)[0]  # type: ignore[arg-type]
    assert (other.options, other.close) == ({"sink": 16}, False)
    assert (other.default.mean, other.best.mean, other.gap.mean) == (0.5, 0.9, pytest.approx(-0.4))
    assert other.paper is None


def test_a_setting_that_fails_is_not_chosen() -> None:
    found = search_prompts(Search(["streaming"], [0.1], 4), Fake(best=16, fails=16), PROMPTS)[0]  # type: ignore[arg-type]
    assert found.options == {}
    assert any("no room" in error for error in found.errors)


def test_fewer_settings_than_asked_for() -> None:
    assert Search(["streaming", "snapkv"], [0.1], 8).fewer == {"streaming": 4}


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ((["full"], [0.1], 4), MethodError),
        ((["snapkv"], [], 4), InputError),
        ((["snapkv"], [0.1], 1), InputError),
        ((["snapkv"], [0.1], 4, {"h2o": {}}), MethodError),
        ((["snapkv"], [0.1], 4, {"snapkv": {"budget": 0.1}}), MethodError),
    ],
)
def test_what_cannot_be_searched(arguments: tuple[Any, ...], error: type[Exception]) -> None:
    with pytest.raises(error):
        Search(*arguments)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return given(tmp_path_factory.mktemp("search"))


def test_the_command_with_prompts(folder: Path, tmp_path: Path) -> None:
    args = ["tune", "--search", "--model", str(folder / "model"), "--data", str(folder), "-n", "4"]
    done = invoke([*args, "--methods", "streaming", "--budgets", "0.5", "--json", str(tmp_path / "s.json")], width=200)
    assert done.exit_code == 0, done.output
    assert "within 3 points" in done.stdout
    assert "* streaming has only 4 settings to try, fewer than 8" in done.stdout
    assert '"within_3_points"' in (tmp_path / "s.json").read_text()


def test_the_command_with_tasks(folder: Path, tmp_path: Path) -> None:
    """The settings and the finalists are runs, on different items; the second call computes nothing again."""
    args = ["tune", "--search", "--model", str(folder / "model"), "--tasks", "cards-1@validation", "--items", "2"]
    args += ["--methods", "streaming", "--budgets", "0.5", "--trials", "2", "--out", str(tmp_path)]
    done = invoke(args, width=200)
    assert done.exit_code == 0, done.output
    lines = {part: (tmp_path / part / "results" / "worker-0.jsonl").read_text() for part in ("settings", "finalists")}
    assert invoke(args).exit_code == 0
    assert (tmp_path / "settings" / "results" / "worker-0.jsonl").read_text() == lines["settings"]
    assert '"seed": 0' in lines["settings"]
    assert '"seed": 1' in lines["finalists"]


def test_commands_of_the_page_are_valid() -> None:
    page = (Path(__file__).parents[2] / "docs/tuning.md").read_text(encoding="utf8")
    lines = re.findall(r"^foveakv tune .*$", page, re.M)
    assert len(lines) == 4
    group = typer.main.get_command(app)
    assert isinstance(group, TyperGroup)
    for line in lines:
        group.commands["tune"].make_context("tune", shlex.split(line)[2:])


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--search", "--score-layer"], "--score-layer and --search are different"),
        (["--layers", "0"], "--layers belongs to --score-layer"),
        (["--score-layer", "--trials", "4"], "--trials belongs to --search"),
        (["--tasks", "cards-1"], "--tasks belongs to --score-layer or --search"),
        (["--score-layer", "--budgets", "0.1"], "leave --methods and --budgets out"),
        (["--score-layer", "--set", "snapkv.window=4"], "--set takes options of hae only"),
        (["--search", "--tasks", "cards-1"], "needs --out"),
        (["--search", "--methods", "full"], "nothing to search"),
        (["--search"], "--data is missing"),
        ([], "--data is missing"),
    ],
)
def test_options_that_do_not_fit(args: list[str], message: str) -> None:
    assert message in error_of(invoke(["tune", *args]))

"""Choosing a budget: which one is the smallest that holds, and what is refused."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny_folder
from typer.testing import CliRunner

from foveakv.cli import app
from foveakv.errors import InputError, MethodError
from foveakv.evaluation.items import Item, Turn
from foveakv.evaluation.results import Result
from foveakv.evaluation.tune import read_prompts, tune

PROMPTS = [Item("prompts", n, 0, (), (Turn("?", ()),)) for n in range(4)]


class Fake:
    """A bench whose loss depends on the budget (and, for one method, on the prompt)."""

    def __init__(self, losses: dict[float, list[float]], fails: float | None = None, scored: int = 1000) -> None:
        self.losses, self.fails, self.scored = losses, fails, scored

    def run(self, item: Item, candidates: Sequence[Any]) -> Iterator[Result]:
        for candidate in candidates:
            budget = candidate.method.budget
            who = (item.task, item.number, item.seed, candidate.method.name, budget, candidate.label, {})
            if budget == self.fails:
                yield Result(*who, error="MethodError: no room")
                continue
            equal = 1 - self.losses[budget][item.number]
            yield Result(
                *who, equal=equal, scored=self.scored, stored_bytes=int(1000 * budget), full_bytes=1000, host_bytes=250
            )


def test_the_smallest_budget_that_holds_with_all_larger_ones() -> None:
    losses = {0.5: [0.0] * 4, 0.2: [0.0] * 4, 0.1: [0.0, 0.0, 0.0, 0.2], 0.05: [0.0] * 4}
    (found,) = tune(Fake(losses), PROMPTS, ["snapkv"], budgets=[0.05, 0.1, 0.5, 0.2], max_loss=0.01)
    assert [tried.budget for tried in found.tried] == [0.5, 0.2, 0.1, 0.05]
    assert found.tried[2].loss.mean == pytest.approx(0.05)
    assert found.best is found.tried[1]
    assert found.best.bytes == pytest.approx(0.2)
    assert found.best.host == pytest.approx(0.25)
    assert found.config() == 'foveakv.compress(model, foveakv.methods.get("snapkv", budget=0.2))'


def test_the_upper_bound_decides_not_the_mean() -> None:
    losses = {0.5: [0.0] * 4, 0.2: [0.0, 0.0, 0.0, 0.03]}
    (found,) = tune(Fake(losses), PROMPTS, ["snapkv"], budgets=[0.2, 0.5], max_loss=0.01)
    assert found.tried[1].loss.mean < 0.01 < found.tried[1].loss.high
    assert found.best is found.tried[0]


def test_a_few_tokens_without_a_loss_prove_little() -> None:
    few, many = (tune(Fake({0.5: [0.0] * 4}, scored=n), PROMPTS, ["snapkv"], budgets=[0.5])[0] for n in (10, 1000))
    assert few.tried[0].upper == pytest.approx(-math.log(0.025) / 40)
    assert few.best is None
    assert few.too_few
    assert many.best is many.tried[0]


def test_replies_of_one_token_leave_nothing_to_judge() -> None:
    (found,) = tune(Fake({0.5: [0.0] * 4}, scored=0), PROMPTS, ["snapkv"], budgets=[0.5])
    assert found.nothing_judged
    assert not found.too_few


def test_prompts_that_a_method_does_not_apply_to_are_left_out() -> None:
    class Some(Fake):
        def run(self, item: Item, candidates: Sequence[Any]) -> Iterator[Result]:
            for result in super().run(item, candidates):
                yield replace(result, error="NoVisualTokensError: no picture") if item.number == 2 else result

    (found,) = tune(Some({0.5: [0.0] * 4}), PROMPTS, ["random"], budgets=[0.5])
    assert found.best is found.tried[0]
    assert (found.best.errors, found.best.skipped, found.best.loss.n) == ((), 1, 3)


def test_no_budget_holds() -> None:
    (found,) = tune(Fake({0.5: [0.5] * 4}), PROMPTS, ["snapkv"], budgets=[0.5])
    assert found.best is None
    assert found.config() is None


def test_a_budget_that_fails_does_not_hold() -> None:
    fake = Fake({0.5: [0.0] * 4, 0.2: [0.0] * 4}, fails=0.2)
    (found,) = tune(fake, PROMPTS, ["snapkv"], budgets=[0.5, 0.2])
    assert found.best is found.tried[0]
    assert found.tried[1].errors == ("MethodError: no room",) * 4


def test_settings_go_into_the_config() -> None:
    options = {"snapkv": {"window": 8}}
    (found,) = tune(Fake({0.5: [0.0] * 4}), PROMPTS, ["snapkv"], budgets=[0.5], options=options)
    assert found.config() == 'foveakv.compress(model, foveakv.methods.get("snapkv", window=8, budget=0.5))'


@pytest.mark.parametrize(
    ("methods", "options", "error"),
    [
        (["full"], {}, MethodError),
        (["snapkv"], {"budgets": [0.1, 512]}, InputError),
        (["snapkv"], {"max_loss": 1.5}, InputError),
        (["snapkv"], {"max_loss": 0}, InputError),
        (["snapkv"], {"budgets": []}, InputError),
        (["snapkv"], {"options": {"snapkv": {"budget": 0.3}}, "budgets": [0.5]}, MethodError),
    ],
)
def test_what_cannot_be_tuned(methods: list[str], options: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        tune(Fake({}), PROMPTS, methods, **options)


def write(folder: Path, *lines: str) -> Path:
    folder.mkdir(exist_ok=True)
    tiny_folder.pictures(folder, 2)
    (folder / "prompts.jsonl").write_text("\n".join(lines))
    return folder


def test_prompts_of_a_folder(tmp_path: Path) -> None:
    both = {"prompt": "what differs?", "images": ["picture0.png", "picture1.png"]}
    first, second = read_prompts(write(tmp_path / "p", json.dumps(both), "", json.dumps({"prompt": "hello"})), 9)
    assert first.turns[0].text == "what differs?"
    assert len(first.images) == 2
    assert (second.turns[0].text, second.turns[0].max_new_tokens) == ("hello", 9)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 1"),
        ('{"text": "x"}', "line 1: unknown field .text."),
        ('{"prompt": 3}', "line 1: prompt must be a text, got 3"),
        ('{"prompt": "x", "images": ["none.png"]}', "none.png"),
        ("", "has no lines"),
    ],
)
def test_damaged_prompts(tmp_path: Path, line: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        read_prompts(write(tmp_path / "p", line))


def test_a_folder_without_prompts(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"prompts\.jsonl is missing"):
        read_prompts(tmp_path)


def test_an_unknown_bound_is_null_in_the_file(tmp_path: Path) -> None:
    model = tiny_folder.save(tmp_path / "model")
    data = write(tmp_path / "prompts", json.dumps({"prompt": "what?", "images": ["picture0.png"]}))
    out = tmp_path / "tuned.json"
    command = (
        f"tune --model {model} --data {data} --methods snapkv --budgets 1.0 -n 4 --json {out} --set snapkv.window=4"
    )
    result = CliRunner().invoke(app, command.split())
    assert result.exit_code == 0, result.output
    assert "nan" not in result.stdout
    assert "# snapkv: too few tokens. 3 were compared" in result.stdout
    tried = json.loads(out.read_text(), parse_constant=pytest.fail)["methods"][0]["tried"][0]
    assert (tried["prompts"], tried["loss_upper"]) == (1, None)


def test_the_command(tmp_path: Path) -> None:
    model = tiny_folder.save(tmp_path / "model")
    lines = [json.dumps({"prompt": f"what is {n}?", "images": ["picture0.png"]}) for n in range(3)]
    data = write(tmp_path / "prompts", *lines)
    out = tmp_path / "tuned.json"
    command = f"tune --model {model} --data {data} --methods snapkv --budgets 0.9,0.3 -n 4 --max-loss 0.9 --json {out}"
    result = CliRunner().invoke(app, [*command.split(), "--set", "snapkv.window=4"])
    assert result.exit_code == 0, result.output
    assert "only 3 prompts" in result.output
    assert 'foveakv.methods.get("snapkv", window=4, budget=' in result.output
    tried = json.loads(out.read_text())["methods"][0]["tried"]
    assert [entry["budget"] for entry in tried] == [0.9, 0.3]
    assert all(entry["prompts"] == 3 and entry["errors"] == [] for entry in tried)

"""The example and the commands of docs/evaluation.md run."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from foveakv.cli import app
from foveakv.evaluation import runner
from foveakv.evaluation.plan import Plan
from foveakv.evaluation.runner import Status

TEXT = (Path(__file__).parents[2] / "docs" / "evaluation.md").read_text(encoding="utf8")
COMMANDS = re.findall(r"^foveakv eval run .*$", TEXT, re.M)


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_make_a_plan(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plans: list[Plan] = []

    def planned(plan: Plan, folder: Path, **options: Any) -> Status:
        plans.append(plan)
        return Status(0, 0, 0, 0, 0)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(runner, "run", planned)
    done = CliRunner().invoke(app, shlex.split(command)[1:])
    assert done.exit_code == 0, done.output
    assert plans[0].entries[0].method == "full"


@pytest.mark.demo
def test_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (example,) = re.findall(r"^```python\n(.*?)^```$", TEXT, re.M | re.S)
    assert ", 20, model" in example
    scope: dict[str, Any] = {}
    exec(compile(example.replace(", 20, model", ", 2, model"), "docs/evaluation.md", "exec"), scope)
    assert len(scope["results"]) == 6
    assert all(result.error is None for result in scope["results"])

"""A method in a file of its own appears in the runner and in the report, with no other change."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny_folder
from typer.testing import CliRunner

from foveakv import methods
from foveakv.cli import app
from foveakv.errors import MethodError
from foveakv.evaluation.compare import candidates
from foveakv.evaluation.plan import Plan
from foveakv.methods import plugins, registry

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """Methods and files are forgotten again."""
    before, files = dict(registry._REGISTERED), dict(plugins._FILES)
    yield
    for kept, was in ((registry._REGISTERED, before), (plugins._FILES, files)):
        kept.clear()
        kept.update(was)


@pytest.fixture
def keynorm(tmp_path: Path) -> Path:
    """The page's method, in a file."""
    page = (ROOT / "docs/adding-a-method.md").read_text(encoding="utf8")
    source = re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S)[0]
    file = tmp_path / "keynorm.py"
    file.write_text(source)
    return file


def test_a_file_is_loaded_once(keynorm: Path) -> None:
    assert plugins.load_file(keynorm) == ["keynorm"]
    found = methods.find("keynorm")
    assert plugins.load_file(str(keynorm)) == ["keynorm"]
    assert methods.find("keynorm") is found
    assert plugins.loaded_files() == (str(keynorm),)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("x = 1", "registers no method"),
        ("1 / 0", "failed: ZeroDivisionError"),
        ("import none_such_module", "failed: ModuleNotFoundError"),
        (None, "is not a file"),
    ],
)
def test_files_that_cannot_be_loaded(tmp_path: Path, source: str | None, message: str) -> None:
    file = tmp_path / "broken.py"
    if source is not None:
        file.write_text(source)
    with pytest.raises(MethodError, match=message):
        plugins.load_file(file)
    assert plugins.loaded_files() == ()


def test_what_a_broken_file_registered_is_forgotten(keynorm: Path) -> None:
    keynorm.write_text(keynorm.read_text() + "\n1 / 0\n")
    with pytest.raises(MethodError, match="ZeroDivisionError"):
        plugins.load_file(keynorm)
    assert "keynorm" not in methods.available()


def test_a_name_belongs_to_the_file_that_registered_it(keynorm: Path, tmp_path: Path) -> None:
    plugins.load_file(keynorm)
    first = methods.find("keynorm")
    other = tmp_path / "other.py"
    other.write_text(keynorm.read_text())
    with pytest.raises(MethodError, match="registers 'keynorm', which another file has registered"):
        plugins.load_file(other)
    assert methods.find("keynorm") is first


def test_an_option_without_a_default_is_asked_for(tmp_path: Path) -> None:
    file = tmp_path / "asks.py"
    file.write_text(
        "import dataclasses, typing, foveakv\n@foveakv.methods.register\n@dataclasses.dataclass\n"
        "class Asks(foveakv.methods.Method):\n    share: float\n    name: typing.ClassVar[str] = 'asks'\n"
    )
    plugins.load_file(file)
    with pytest.raises(MethodError, match="asks needs a value for 'share'"):
        methods.get("asks")
    assert methods.get("asks", share=0.5).share == 0.5


def test_results_of_a_file_that_was_changed_do_not_stay(keynorm: Path) -> None:
    """Else the same command would say that there is nothing to do, and show what the old code did."""
    plugins.load_file(keynorm)
    old = Plan.of(["cards-1"], candidates(["keynorm", "snapkv"], [0.5]), 1)
    assert Plan.from_dict(json.loads(json.dumps(old.to_dict()))) == old
    assert Plan.of(["cards-1"], candidates(["keynorm", "snapkv"], [0.5]), 1).conflicts(old) == []
    keynorm.write_text(keynorm.read_text() + "\n# better\n")
    plugins._FILES.clear()
    registry._REGISTERED.clear()
    plugins.load_file(keynorm)
    found = Plan.of(["cards-1"], candidates(["keynorm", "snapkv"], [0.5]), 1).conflicts(old)
    assert found == ["'keynorm 0.5' depends on a file that has changed (its own file, or one that its settings name)"]


def test_runner_and_report(keynorm: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    model = tiny_folder.save(tmp_path / "model")
    out = tmp_path / "run"
    command = f"--plugin {keynorm} eval run --tasks cards-4 --methods keynorm --budgets 0.5 --items 2"
    result = CliRunner().invoke(app, [*command.split(), "--model", str(model), "--out", str(out)])
    assert result.exit_code == 0, result.output
    lines = [json.loads(line) for file in (out / "results").glob("*.jsonl") for line in file.read_text().splitlines()]
    assert sorted({line["label"] for line in lines}) == ["full", "keynorm 0.5", "random 0.5"]
    assert all(line["error"] is None for line in lines)
    kept = [line["stored_bytes"] / line["full_bytes"] for line in lines if line["method"] == "keynorm"]
    assert max(kept) < 0.8
    assert json.loads((out / "plan.json").read_text())["plugins"] == [str(keynorm)]
    result = CliRunner().invoke(app, ["eval", "report", str(out)])
    assert result.exit_code == 0, result.output
    assert "keynorm" in (out / "report" / "report.html").read_text()
    assert "keynorm" in (out / "report" / "leaderboard.json").read_text()


def test_a_missing_plugin_is_one_line(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["--plugin", str(tmp_path / "none.py"), "methods"])
    assert result.exit_code == 2
    assert "is not a file" in result.output

"""Every example runs on the embedded model, without a download."""

from __future__ import annotations

import json
import re
import runpy
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import foveakv
from foveakv import models
from foveakv.methods import registry

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted((ROOT / "examples").glob("*.py"))
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))


@pytest.fixture(scope="module")
def demo() -> models.Loaded:
    return models.load("demo")


@pytest.fixture
def run(
    demo: models.Loaded, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> Iterator[Callable[[Path], str]]:
    """Runs a script in an empty folder and returns what it prints; methods that it registers are removed afterwards."""
    monkeypatch.setattr(foveakv, "load", lambda name: demo, raising=False)
    monkeypatch.chdir(tmp_path)
    registered = dict(registry._REGISTERED)

    def run(script: Path) -> str:
        runpy.run_path(str(script), run_name="__main__")
        return capsys.readouterr().out

    yield run
    registry._REGISTERED.clear()
    registry._REGISTERED.update(registered)


def code_of(notebook: Path) -> str:
    cells = json.loads(notebook.read_text(encoding="utf8"))["cells"]
    return "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")


@pytest.mark.demo
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_script_runs(run: Callable[[Path], str], script: Path) -> None:
    output = run(script)
    assert "expected" in output
    assert "foveakv report" in output or Path("kept.png").exists()


@pytest.mark.demo
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(run: Callable[[Path], str], notebook: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    script = tmp_path / "cells.py"
    script.write_text(code_of(notebook), encoding="utf8")
    output = run(script)
    assert "foveakv report: snapkv" in output
    assert Path("kept.png").exists()


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_committed_without_outputs(notebook: Path) -> None:
    for cell in json.loads(notebook.read_text(encoding="utf8"))["cells"]:
        assert not cell.get("outputs")
        assert cell.get("execution_count") is None


def test_every_example_is_listed() -> None:
    listed = re.findall(r"\]\(([\w.]+)\)", (ROOT / "examples/README.md").read_text(encoding="utf8"))
    assert sorted(listed) == sorted(path.name for path in [*SCRIPTS, *NOTEBOOKS])


def test_own_method_is_the_one_of_the_documentation() -> None:
    page = (ROOT / "docs/adding-a-method.md").read_text(encoding="utf8")
    definition = re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S)[0]
    assert definition in (ROOT / "examples/own_method.py").read_text(encoding="utf8")

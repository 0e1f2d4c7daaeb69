"""The examples of the README and of the docs run, and generated tables are in step with the code."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import families
import pytest
import tiny_folder
from checkout import ROOT, committed
from typer.testing import CliRunner

import foveakv
from foveakv import methods
from foveakv.cli import app

DOCS = committed("docs/*.md")
PAGES = ["README.md", *(str(page.relative_to(ROOT)) for page in DOCS or sorted((ROOT / "docs").rglob("*.md")))]


def blocks(page: str, language: str) -> list[str]:
    """The fenced blocks of a page in one language ("" for shell commands)."""
    return re.findall(rf"^```{language}\n(.*?)^```$", (ROOT / page).read_text(encoding="utf8"), re.M | re.S)


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`foveakv.load` gives a tiny model whatever the name, and a.png and b.png lie in the working folder."""
    from foveakv import models

    model, processor = families.build("llava"), tiny_folder.processor()
    loaded = models.Loaded(model, processor)
    monkeypatch.setattr(models, "load", lambda *args, **kwargs: loaded)
    monkeypatch.setattr(foveakv, "load", models.load, raising=False)
    monkeypatch.chdir(tmp_path)
    for i, name in enumerate(("a.png", "b.png")):
        tiny_folder.picture(i).save(name)
    Path("prompts").mkdir()
    Path("prompts", "prompts.jsonl").write_text('{"prompt": "what is it?"}\n')


@pytest.fixture
def registry() -> Iterator[None]:
    """Methods that an example registers are forgotten again."""
    before = dict(methods._REGISTERED)
    yield
    methods._REGISTERED.clear()
    methods._REGISTERED.update(before)


def run(source: str, scope: dict[str, Any]) -> None:
    exec(compile(source, "example", "exec"), scope)


def test_readme_examples(tiny: None, capsys: pytest.CaptureFixture[str]) -> None:
    examples = blocks("README.md", "python")
    assert len(examples) == 2
    scope: dict[str, Any] = {}
    for example in examples:
        run(example, scope)
    assert "foveakv report: hybridkv" in capsys.readouterr().out


@pytest.mark.demo
def test_readme_examples_with_the_embedded_model(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for i, name in enumerate(("a.png", "b.png")):
        tiny_folder.picture(i, size=(112, 112)).save(name)
    scope: dict[str, Any] = {}
    for example in blocks("README.md", "python"):
        run(example, scope)
    assert "foveakv report: hybridkv" in capsys.readouterr().out


def test_method_example(registry: None) -> None:
    definition, use = blocks("docs/adding-a-method.md", "python")
    assert len(definition.splitlines()) <= 40
    model, inputs = families.build("llava"), families.prompt("llava", images=3)
    scope: dict[str, Any] = {"model": model, "inputs": inputs}
    # dataclasses look their module up by name
    scope["__name__"] = __name__
    run(definition, scope)
    run(use, scope)
    report = scope["session"].report
    assert report.evicted > 0
    text = inputs["input_ids"].shape[1] - 3 * 16
    assert scope["session"].kept(0).shape[-1] == max(inputs["input_ids"].shape[1] // 2, text) + 7


@pytest.mark.parametrize("page", ["README.md", "docs/cli.md"])
def test_commands_run(tiny: None, page: str) -> None:
    pytest.importorskip("matplotlib")
    lines = [line for block in blocks(page, "") for line in block.splitlines() if line.startswith("foveakv ")]
    assert lines
    for line in lines:
        extra = ["--max-new-tokens", "2"] if line.split()[1] in ("generate", "compare") else []
        result = CliRunner().invoke(app, shlex.split(line)[1:] + extra)
        assert result.exit_code == 0, f"{line}\n{result.output}"


def test_make_targets_in_the_readme_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"(?:^|`)make ([a-z-]+)", (ROOT / "README.md").read_text(), re.M)):
        assert re.search(rf"^{target}:", makefile, re.M), target


def test_methods_table_names_every_method() -> None:
    table = (ROOT / "README.md").read_text().split("## Methods")[1].split("\n## ")[0]
    assert sorted(re.findall(r"^\| `(\w+)` \|", table, re.M)) == methods.available()


def test_options_of_the_command_line_are_documented() -> None:
    page = (ROOT / "docs/cli.md").read_text()
    for command in ("generate", "compare", "tune"):
        text = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "200", "TERM": "dumb"}).output
        options = set(re.findall(r"--[a-z][a-z-]+", text)) - {"--help", "--no-trust-remote-code"}
        assert [option for option in sorted(options) if option not in page] == []


def test_supported_models_are_in_step() -> None:
    table = CliRunner().invoke(app, ["models", "--markdown"]).stdout.strip()
    assert table in (ROOT / "docs/supported-models.md").read_text()


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", (ROOT / page).read_text()):
        assert "://" in target or (ROOT / page).parent.joinpath(target).exists(), target

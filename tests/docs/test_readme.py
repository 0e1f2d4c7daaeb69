"""Examples and commands of the documentation run, links resolve, and generated tables match the code."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import families
import pytest
import tiny_folder
import typer
from checkout import ROOT, committed
from typer.testing import CliRunner

import foveakv
from benchmarks.readme import BEGIN, END, block
from foveakv.cli import app
from foveakv.methods import registry

DOCS = committed("docs/*.md")
PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "training/README.md",
    *(str(page.relative_to(ROOT)) for page in DOCS or sorted((ROOT / "docs").rglob("*.md"))),
]


def blocks(page: str, language: str) -> list[str]:
    """The fenced blocks of a page in one language ("" for shell commands)."""
    fences = re.findall(r"^```(\w*)\n(.*?)^```$", (ROOT / page).read_text(encoding="utf8"), re.M | re.S)
    return [text for name, text in fences if name == language]


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`foveakv.load` gives a tiny model whatever the name, and a.png and b.png are in the working folder."""
    from foveakv import models

    model, processor = families.build("llava"), tiny_folder.processor()
    loaded = models.Loaded(model, processor)
    # `foveakv.load` first: it is looked up in `models` on first use, and what is restored must be the real one.
    monkeypatch.setattr(foveakv, "load", lambda *args, **kwargs: loaded, raising=False)
    monkeypatch.setattr(models, "load", foveakv.load)
    monkeypatch.chdir(tmp_path)
    for i, name in enumerate(("a.png", "b.png")):
        tiny_folder.picture(i).save(name)
    Path("prompts").mkdir()
    tiny_folder.picture().save("prompts/a.png")
    Path("prompts", "prompts.jsonl").write_text('{"prompt": "what is it?", "images": ["a.png"]}\n')


@pytest.fixture
def forgotten() -> Iterator[None]:
    """Methods that an example registers are forgotten again."""
    before = dict(registry._REGISTERED)
    yield
    registry._REGISTERED.clear()
    registry._REGISTERED.update(before)


def run(source: str, scope: dict[str, Any]) -> None:
    exec(compile(source, "example", "exec"), scope)


GUIDES = ["index", "usage", "quantization", "contexts", "saving", "pool"]
EXAMPLES = ["README.md", *(f"docs/{page}.md" for page in GUIDES)]


@pytest.mark.parametrize("page", EXAMPLES)
def test_examples_run(tiny: None, page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # some write files
    run_all(page)


@pytest.mark.demo
@pytest.mark.parametrize("page", ["README.md", "docs/usage.md"])
def test_examples_run_with_the_embedded_model(page: str) -> None:
    run_all(page)


def run_all(page: str) -> None:
    examples = blocks(page, "python")
    assert examples
    scope: dict[str, Any] = {}
    for example in examples:
        run(example, scope)
    assert scope["session"].report.evicted > 0


def test_measured_figures_are_those_of_the_result_files() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf8")
    assert readme.split(BEGIN)[1].split(END)[0].strip() == block()


def test_method_example(forgotten: None) -> None:
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


def commands(group: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The words of every command, e.g. ("eval", "run")."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, (*path, name))
        else:
            yield (*path, name)


def test_every_command_is_documented() -> None:
    page = (ROOT / "docs/cli.md").read_text(encoding="utf8")
    found = list(commands(typer.main.get_command(app)))
    assert ("generate",) in found
    assert [words for words in found if f"foveakv {' '.join(words)}" not in page] == []


def test_options_of_the_command_line_are_documented() -> None:
    page = (ROOT / "docs/cli.md").read_text()
    for command in ("generate", "compare", "tune", "serve"):
        text = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "200", "TERM": "dumb"}).output
        options = set(re.findall(r"--[a-z][a-z-]+", text)) - {"--help", "--no-trust-remote-code"}
        assert [option for option in sorted(options) if option not in page] == []


def test_table_of_supported_models_is_up_to_date() -> None:
    table = CliRunner().invoke(app, ["models", "--markdown"]).stdout.strip()
    assert table in (ROOT / "docs/supported-models.md").read_text()


@pytest.mark.parametrize("page", PAGES)
def test_links_resolve(page: str) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", (ROOT / page).read_text()):
        assert "://" in target or (ROOT / page).parent.joinpath(target).exists(), target

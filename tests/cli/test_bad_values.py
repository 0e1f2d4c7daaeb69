"""Values that cannot work, in any option of any command: one line and exit code 2."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from command_lines import commands, error_of, given, invoke

from foveakv.cli import app


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return given(tmp_path_factory.mktemp("given"))


# ---- images


def test_allow_urls_is_needed(folder: Path, tmp_path: Path) -> None:
    for name in ("generate", "compare", "show", "heads", "sparsity", "eviction"):
        args = [*commands(folder, tmp_path)[name], "-i", "http://127.0.0.1:1/a.png"]
        assert "--allow-urls" in error_of(invoke(args))
        assert "cannot fetch http://127.0.0.1:1/a.png" in error_of(invoke([*args, "--allow-urls"]))


# ---- tune


def test_tune_fails_when_every_prompt_fails(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "<image> <image>?", "images": []}\n')
    model = ["--model", str(folder / "model")]
    args = ["tune", *model, "--data", str(tmp_path), "--methods", "snapkv,h2o", "--budgets", "0.5", "-n", "4"]
    result = invoke(args)
    assert "every prompt failed with snapkv, h2o; the reasons are above" in error_of(result)
    assert "failed: snapkv" in result.stdout


def test_tune_reports_some_failed_prompts(folder: Path, tmp_path: Path) -> None:
    lines = ['{"prompt": "<image> <image>?", "images": []}', '{"prompt": "What is it, and why?"}']
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
    args = ["tune", "--model", str(folder / "model"), "--data", str(tmp_path), "--methods", "snapkv"]
    assert invoke([*args, "--budgets", "0.5", "--set", "snapkv.window=4", "-n", "4"]).exit_code == 1


@pytest.mark.parametrize(("args", "message"), [
    (["--methods", "full"], "there is nothing to tune"),
    (["--methods", "fastv"], "there is nothing to tune"),
    (["--methods", "snapkv", "--max-loss", "0"], "max_loss is a share"),
    (["--methods", "snapkv", "--max-loss", "nan"], "max_loss is a share"),
    (["--methods", "snapkv", "--budgets", "0.5,64"], "must be of one kind"),
])  # fmt: skip
def test_tune_checks_its_methods_before_the_model_is_loaded(
    folder: Path, args: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from foveakv import models

    monkeypatch.setattr(models, "load", lambda *a, **k: pytest.fail("the model was loaded"))
    assert message in error_of(invoke(["tune", "--data", str(folder), *args]))


# ---- nonsense


NONSENSE = ("", "banana", "-1", "99999999999999999999", "9" * 5000, "\udcff\u2603[bold]")


def leaves(group: Any, words: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command and its words."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from leaves(command, (*words, name))
        else:
            yield (*words, name), command


COMMANDS = dict(leaves(typer.main.get_command(app)))


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_nonsense_in_any_option_is_one_line(
    words: tuple[str, ...], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No value of any option raises anything, up to loading the model."""
    from foveakv import models
    from foveakv.errors import ModelLoadError

    def load(*args: Any, **options: Any) -> None:
        raise ModelLoadError("everything else was fine")

    monkeypatch.setattr(models, "load", load)
    monkeypatch.chdir(tmp_path)
    base = commands(folder, tmp_path).get(words[-1], [*words])
    for parameter in COMMANDS[words].params:
        option = max(parameter.opts, key=len)
        if option == "--ray-address" or getattr(parameter, "is_flag", False):
            continue  # the first one would start a cluster
        for value in NONSENSE:
            result = invoke([*words, value] if not option.startswith("-") else [*base, f"{option}={value}"])
            shown = f"{option}={value[:40]!r}: {result.exception!r}\n{result.output}"
            assert result.exception is None or isinstance(result.exception, SystemExit), shown
            assert result.exit_code in (0, 2), shown
            assert "Traceback" not in result.output, shown

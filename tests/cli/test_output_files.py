"""Output files of every command: links, pipes and devices, and files that cannot be written."""

from __future__ import annotations

import json
import os
import stat
import subprocess
from pathlib import Path

import pytest
from command_lines import LOADING, commands, error_of, given, invoke, shell


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return given(tmp_path_factory.mktemp("given"))


needs_full = pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")


# ---- output files


def outputs(name: str) -> list[tuple[str, str]]:
    """The options of a command that name a file."""
    plots = [("--json", "json"), ("--csv", "csv"), ("--plot", "png")]
    return {
        "generate": [("--json", "json")],
        "compare": [("--json", "json"), ("--plot", "png"), ("--kept-png", "png")],
        "show": [("--json", "json"), ("--csv", "csv"), ("--out", "png"), ("--filmstrip", "png")],
        "tune": [("--json", "json")],
        "heads": plots, "sparsity": plots, "eviction": plots,
        "visual-heads": [("--out", "json"), ("--out", "safetensors")],
    }[name]  # fmt: skip


EVERY = [(name, *each) for name in LOADING if name != "run" for each in outputs(name)]


@pytest.mark.parametrize(("name", "option", "suffix"), EVERY)
def test_links_are_followed(folder: Path, tmp_path: Path, name: str, option: str, suffix: str) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "data").mkdir()
    link = tmp_path / f"link.{suffix}"
    link.symlink_to(tmp_path / "data" / f"target.{suffix}")
    result = invoke([*commands(folder, tmp_path)[name], option, str(link)])
    assert result.exit_code == 0, result.output
    assert link.is_symlink()
    assert (tmp_path / "data" / f"target.{suffix}").stat().st_size > 20
    assert [path.name for path in (tmp_path / "data").iterdir()] == [f"target.{suffix}"]


@needs_full
@pytest.mark.parametrize("name", [name for name in LOADING if name not in ("run", "visual-heads")])
def test_a_full_device_is_one_line(folder: Path, tmp_path: Path, name: str) -> None:
    text = error_of(invoke([*commands(folder, tmp_path)[name], "--json", "/dev/full"]))
    assert text == "error: cannot write /dev/full: No space left on device"
    assert stat.S_ISCHR(os.stat("/dev/full").st_mode)


@pytest.mark.parametrize(("name", "option", "suffix"), EVERY)
def test_bad_files_are_found_before_the_model_is_loaded(
    folder: Path, tmp_path: Path, name: str, option: str, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from foveakv import models

    monkeypatch.setattr(models, "load", lambda *a, **k: pytest.fail("the model was loaded"))
    (tmp_path / "file").write_text("in the way")
    (tmp_path / f"folder.{suffix}").mkdir()
    for path, message in (
        (tmp_path / "file" / f"out.{suffix}", "Not a directory"),
        (tmp_path / f"folder.{suffix}", "is a folder; give the name of a file"),
        (tmp_path / f"{'x' * 300}.{suffix}", "File name too long"),
    ):
        assert message in error_of(invoke([*commands(folder, tmp_path)[name], option, str(path)]))


def test_json_to_stdout(folder: Path, tmp_path: Path) -> None:
    done = shell([*commands(folder, tmp_path)["generate"], "--json", "/dev/stdout"], stdout=subprocess.PIPE)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout[done.stdout.index("{\n") :])["prompt"] == "What differs?"

"""Widths, devices and streams: what a shell may do to a command, for every command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from command_lines import LOADING, NAMES, SOURCE, commands, error_of, given, invoke, shell

from foveakv.cli import main


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return given(tmp_path_factory.mktemp("given"))


# ---- widths


ENTRIES = {
    "generate": ("tokens seen", "stored bytes", "prefill"),
    "compare": (
        "transformers",
        "full",
        "snapkv 0.1",
        "hybridkv 0.2",
        "answer",
        "same",
        "stored",
        "prefill",
        "per token",
    ),
    "show": ("picture0.png", "picture1.png", "all layers", "%"),
    "tune": (
        "snapkv",
        "budget",
        "tokens that differ",
        "upper bound",
        "stored / full",
        "host / full",
        "total / full",
        "holds",
    ),
    "heads": ("What differs?", "tokens", "static", "mean S", "lowest - highest S", "heads that change type", "50%"),
    "sparsity": (
        "visual / text, first layer",
        "mean of layers",
        "first layer evicts",
        "others too, same rule",
        "by chance",
        "layer that decides",
        "best tokens kept, sum",
    ),
    "eviction": ("D", "at the same", "bin loses", "greedy loses", "traces with bin <= greedy", "evicted bin / greedy"),
    "models": ("HuggingFaceTB/SmolVLM-256M-Instruct", "0.26 B", "qwen2_5_vl", "not supported"),
    "doctor": ("torch", "transformers", "kernel reference", "decode attention", "reference ok"),
    "methods": ("hybridkv", "recycle_bin_size=64"),
}


@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize("name", ENTRIES)
def test_every_column_can_be_read(folder: Path, tmp_path: Path, name: str, width: int) -> None:
    result = invoke(commands(folder, tmp_path)[name], width)
    assert result.exit_code == 0, result.output
    assert "…" not in result.stdout
    letters = "".join(result.stdout.split())
    wrapped = [entry for entry in ENTRIES[name] if "".join(entry.split()) not in letters]
    # In columns a heading may wrap, and its words are then on lines of their own.
    assert [entry for entry in wrapped if any(word not in letters for word in entry.split())] == []


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_answer_of_compare_can_be_read(folder: Path, tmp_path: Path, width: int) -> None:
    out = tmp_path / "out.json"
    result = invoke([*commands(folder, tmp_path)["compare"], "--json", str(out)], width)
    rows = json.loads(out.read_text())["rows"]
    assert result.exit_code == 0
    assert any(row["text"].strip() for row in rows)
    letters = "".join(result.stdout.split())
    for row in rows:
        assert "".join(row["label"].split()) in letters
        if width == 60:  # stacked, so an answer is in one piece
            assert "".join(row["text"].split())[:12] in letters


# ---- devices and dtypes


@pytest.mark.parametrize("name", LOADING)
@pytest.mark.parametrize(("option", "message"), [
    (["--device", "banana"], "unknown device 'banana'; use cpu, cuda or cuda:1"),
    (["--device", "cpu:7"], "there is no device 'cpu:7'; the last one is cpu:0"),
    (["--device", "meta"], "the device 'meta' is not available"),
    (["--dtype", "banana"], "unknown dtype 'banana'; use float32"),
    (["--dtype", "int8"], "unknown dtype 'int8'; use float32"),
])  # fmt: skip
def test_devices_and_dtypes(folder: Path, tmp_path: Path, name: str, option: list[str], message: str) -> None:
    assert message in error_of(invoke([*commands(folder, tmp_path)[name], *option]))
    assert [path.name for path in tmp_path.iterdir()] == []


def test_cuda_where_there_is_none(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: None)
    for name in LOADING:
        for device in ("cuda", "cuda:1"):
            text = error_of(invoke([*commands(folder, tmp_path)[name], "--device", device]))
            assert f"the device '{device}' is not available; PyTorch" in text
            assert "finds cpu on this machine" in text


# ---- streams


needs_full = pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")


@needs_full
@pytest.mark.parametrize("name", [*NAMES, "--help", "--version"])
def test_a_full_stdout_is_one_line(
    folder: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["foveakv", *commands(folder, tmp_path).get(name, [name])])
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        with pytest.raises(SystemExit) as end:
            main()
    error = capsys.readouterr().err
    assert end.value.code == 2, error
    lines = [line for line in error.splitlines() if "No space left on device" in line]
    assert lines == ["error: standard output: No space left on device"]


@needs_full
@pytest.mark.parametrize("name", ["generate", "methods"])
def test_a_full_stdout_in_a_process(folder: Path, tmp_path: Path, name: str) -> None:
    """Python itself says nothing more when it exits."""
    with open("/dev/full", "w") as full:
        done = shell(commands(folder, tmp_path)[name], stdout=full)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1] == "error: standard output: No space left on device"


@pytest.mark.parametrize("name", ["generate", "methods", "--version"])
def test_a_closed_stdout_is_one_line(folder: Path, tmp_path: Path, name: str) -> None:
    done = shell(commands(folder, tmp_path).get(name, [name]), preexec_fn=lambda: os.close(1))
    assert (done.returncode, done.stderr) == (2, "error: standard output is closed\n")


@pytest.mark.parametrize("name", ["generate", "methods", "--help"])
def test_a_reader_that_has_gone(folder: Path, tmp_path: Path, name: str) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = shell(commands(folder, tmp_path).get(name, [name]), stdout=writing)
    os.close(writing)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "error" not in done.stderr


def test_a_terminal_without_unicode(folder: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "PYTHONIOENCODING": "ascii"}
    args = [*commands(folder, tmp_path)["show"], "-p"]
    args[args.index("-p") + 1] = "Où?"
    command = [sys.executable, "-m", "foveakv", *args[:-1]]
    done = subprocess.run(command, env=environment, capture_output=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert rb"O\xf9?" in done.stdout


@needs_full
def test_a_full_stderr_leaves_the_exit_code() -> None:
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    command = [sys.executable, "-m", "foveakv", "generate", "-p", "x", "--method", "nope"]
    with open("/dev/full", "w") as full:
        assert subprocess.run(command, env=environment, stderr=full, timeout=300).returncode == 2


# ---- unexpected failures of the system


def test_running_out_of_memory_is_one_line(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from foveakv import models

    def fail(*args: Any, **options: Any) -> None:
        import torch

        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 TiB.\nmore")

    monkeypatch.setattr(models, "load", fail)
    text = error_of(invoke(commands(folder, tmp_path)["generate"]))
    assert text == "error: out of memory: CUDA out of memory. Tried to allocate 2 TiB."

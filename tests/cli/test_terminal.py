"""Streams, devices and widths: what a shell may do to a command, for every command."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny_folder
from typer.testing import CliRunner, Result

from foveakv.cli import app, main

SOURCE = Path(__file__).parents[2] / "src"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Model, images, prompts and samples."""
    folder = tmp_path_factory.mktemp("given")
    tiny_folder.save(folder / "model")
    tiny_folder.pictures(folder, 2)
    (folder / "prompts.jsonl").write_text('{"prompt": "What is it, and why?", "images": ["picture0.png"]}\n')
    (folder / "samples.jsonl").write_text('{"prompt": "<image> reads?", "images": ["picture0.png"]}\n')
    return folder


def commands(folder: Path, out: Path) -> dict[str, list[str]]:
    """Every command, with arguments that work."""
    model = ["--model", str(folder / "model")]
    prompt = [*model, "-i", str(folder / "picture0.png"), "-i", str(folder / "picture1.png"), "-p", "What differs?"]
    small = ["--set", "snapkv.window=4"]
    run = ["--tasks", "cards-1", "--items", "1", "--methods", "snapkv", "--budgets", "0.5", "--out", str(out / "run")]
    return {
        "generate": ["generate", *prompt, "--method", "snapkv", "--set", "window=4", "-n", "2"],
        "compare": ["compare", *prompt, "--methods", "full,snapkv,hybridkv", *small, "-n", "4"],
        "show": [
            "show",
            *prompt,
            "--method",
            "snapkv",
            "--set",
            "window=4",
            "-n",
            "2",
            "--json",
            str(out / "show.json"),
        ],
        "tune": ["tune", *model, "--data", str(folder), "--methods", "snapkv", "--budgets", "0.5", *small, "-n", "4"],
        "heads": ["analyze", "heads", *prompt, "-p", "And what is this?"],
        "sparsity": ["analyze", "sparsity", *prompt, "--set", "target_visual_tokens=0.5"],
        "eviction": ["analyze", "eviction", *prompt, "-n", "6", "--bins", "2,4"],
        "visual-heads": [
            "analyze",
            "visual-heads",
            *model,
            "--data",
            str(folder),
            "--out",
            str(out / "s.json"),
            "-n",
            "3",
        ],
        "run": ["eval", "run", *model, *run],
        "methods": ["methods"],
        "models": ["models"],
        "doctor": ["doctor"],
        "kernels": ["kernels", "list"],
        "build": ["kernels", "build"],
    }


NAMES = list(commands(Path(), Path()))
LOADING = [name for name in NAMES if name not in ("methods", "models", "doctor", "kernels", "build")]


def invoke(args: list[str], width: int = 110) -> Result:
    return CliRunner().invoke(app, args, env={"COLUMNS": str(width)})


def error_of(result: Result) -> str:
    assert result.exit_code == 2, result.output + repr(result.exception)
    assert "Traceback" not in result.output
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    return line


def shell(args: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "foveakv", *args]
    return subprocess.run(command, env=environment, stderr=subprocess.PIPE, text=True, timeout=300, **options)


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
    "tune": ("snapkv", "budget", "tokens that differ", "upper bound", "stored / full", "host / full", "holds"),
    "heads": ("What differs?", "tokens", "static", "mean S", "lowest - highest S", "heads that change type"),
    "sparsity": ("first layer", "all layers", "first layer evicts", "others' overlap", "by chance", "attention lost"),
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


@needs_full
def test_a_full_stderr_leaves_the_exit_code() -> None:
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    command = [sys.executable, "-m", "foveakv", "generate", "-p", "x", "--method", "nope"]
    with open("/dev/full", "w") as full:
        assert subprocess.run(command, env=environment, stderr=full, timeout=300).returncode == 2


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


# ---- unexpected failures of the system


def test_running_out_of_memory_is_one_line(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from foveakv import models

    def fail(*args: Any, **options: Any) -> None:
        import torch

        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 TiB.\nmore")

    monkeypatch.setattr(models, "load", fail)
    text = error_of(invoke(commands(folder, tmp_path)["generate"]))
    assert text == "error: out of memory: CUDA out of memory. Tried to allocate 2 TiB."

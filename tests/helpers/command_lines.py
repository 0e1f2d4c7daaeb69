"""Every command of `foveakv` with arguments that work, on a tiny model in a folder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import tiny_folder
from typer.testing import CliRunner, Result

from foveakv.cli import app

SOURCE = Path(__file__).parents[2] / "src"


def given(folder: Path) -> Path:
    """Write model, images, prompts and samples to the folder."""
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

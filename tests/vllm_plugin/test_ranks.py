"""Tensor parallelism: all ranks keep the same tokens, and two ranks compute what one does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny_checkpoints

HELPERS = Path(__file__).parent / "helpers"


def run(path: Path, ranks: int) -> Any:
    """Run an engine in a process of its own."""
    given = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HELPERS), *sys.path])}
    if ranks > 1:
        given["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(map(str, range(ranks)))
    command = [sys.executable, str(HELPERS / "run_ranks.py"), str(path), str(ranks)]
    done = subprocess.run(command, env=given, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="two ranks need two processors")
def test_two_ranks_equal_one(checkpoints: Path) -> None:
    path = tiny_checkpoints.checkpoint("tiny-llava", checkpoints)
    one, two = run(path, 1), run(path, 2)
    for alone, together in zip(one, two, strict=True):
        assert alone["tokens"] == together["tokens"]
        assert alone["chosen"] == pytest.approx(together["chosen"], abs=1e-4)
        assert alone["report"] == together["report"]
    assert one[0]["report"]["foveakv"]["freed_blocks"] > 0
    assert one[2]["report"] is None

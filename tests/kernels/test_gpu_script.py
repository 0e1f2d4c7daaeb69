"""`benchmarks.gpu`, the script that measures the triton backend, without a GPU."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)


@pytest.fixture
def repository(monkeypatch: pytest.MonkeyPatch) -> Path:
    """The root of the repository, from which `benchmarks` is importable."""
    root = Path(__file__).parents[2]
    monkeypatch.syspath_prepend(str(root))
    return root


@pytest.mark.slow
def test_gpu_script_at_toy_sizes(tmp_path: Path, repository: Path) -> None:
    """Every section of the script runs to its end on a CPU, and the file holds what it promises."""
    out = tmp_path / "gpu.json"
    paths = os.pathsep.join(filter(None, [str(repository / "src"), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", "--smoke", "--out", str(out)],
        cwd=repository, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    content = json.loads(out.read_text())
    assert set(content["sections"]) == {"correctness", "graph", "decode", "generation", "tune"}
    for name, record in content["sections"].items():
        assert record["status"] == "complete", name
        assert record["rows"], name
    assert content["machine"]["versions"]["torch"] == torch.__version__
    assert content["machine"]["versions"]["triton"]


def test_gpu_script_keeps_what_it_has(tmp_path: Path, repository: Path) -> None:
    """A section that fails or runs out of time loses neither its rows nor the other sections."""
    from benchmarks import gpu, gpu_common

    options = gpu.parse(["--smoke", "--deadline", "100", "--out", str(tmp_path / "gpu.json")])
    bench = gpu_common.Bench(options)

    def slow(bench: Any) -> Any:
        yield {"row": 1}
        bench.until = 0
        yield {"row": 2}
        yield {"row": 3}

    def broken(bench: Any) -> Any:
        yield {"row": 1}
        raise RuntimeError("no such kernel")

    bench.run("slow", slow, 0.5)
    bench.run("broken", broken, 1)
    sections = json.loads(options.out.read_text())["sections"]
    assert (sections["slow"]["status"], len(sections["slow"]["rows"])) == ("out of time", 2)
    assert (sections["broken"]["status"], len(sections["broken"]["rows"])) == ("failed", 1)
    assert "no such kernel" in sections["broken"]["traceback"]


def test_gpu_script_says_what_it_would_do(capsys: pytest.CaptureFixture[str], repository: Path) -> None:
    from benchmarks import gpu

    assert gpu.main(["--dry-run", "--section", "decode", "--section", "tune", "--deadline", "94"]) == 0
    assert "decode: up to 70 s." in capsys.readouterr().out
    with pytest.raises(SystemExit):
        gpu.parse(["--deadline", "0"])
    if not torch.cuda.is_available():
        assert gpu.main([]) == 2
        assert "no CUDA device" in capsys.readouterr().err

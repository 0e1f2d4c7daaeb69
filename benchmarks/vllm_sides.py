"""Processes with a vLLM engine each, see `vllm_worker`."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PYTHON = ROOT / ".venv-vllm" / "bin" / "python"


def python() -> Path:
    """Return the Python of an environment with vLLM: this one, or that of `make test-vllm`."""
    if importlib.util.find_spec("vllm"):
        return Path(sys.executable)
    if PYTHON.exists():
        return PYTHON
    raise SystemExit(
        "this benchmark needs vLLM: `make .venv-vllm/.ready` installs it into an environment of its own (3.7 GB), "
        "which is then found; or run the benchmark in an environment that has vLLM"
    )


class Side:
    """An engine. Tasks are the methods of `vllm_worker.Engine`."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self.process, self.log = process, log
        self.hello = self._answer()

    def do(self, task: str, **arguments: Any) -> Any:
        """Run a task and return its answer."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": task, **arguments}) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"vLLM's process has ended:\n{self.log.read_text(encoding='utf8')[-3000:]}")
        return json.loads(line)


@contextmanager
def sides(threads: int, **settings: dict[str, Any]) -> Iterator[dict[str, Side]]:
    """Start an engine per name, with arguments of `vllm_worker.Engine`."""
    environment = {
        **os.environ, "OMP_NUM_THREADS": str(threads), "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")]),
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        found = {}
        for name, given in settings.items():
            log = Path(folder) / name
            command = [str(python()), "-m", "benchmarks.vllm_worker", json.dumps(given)]
            output = stack.enter_context(log.open("w"))
            process = subprocess.Popen(
                command,
                env=environment,
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                text=True,
            )
            stack.callback(_end, process)
            found[name] = Side(process, log)
        yield found


def _end(process: subprocess.Popen[str]) -> None:
    process.terminate()
    process.wait(60)

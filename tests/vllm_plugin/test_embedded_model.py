"""The embedded model through vLLM's Transformers backend: answers, and equality with transformers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from dropped_reference import Reference, check

from foveakv.models import embedded

pytestmark = pytest.mark.demo
CARDS = [[8, 2], [12, 9], [4, 1]]
HELPERS = Path(__file__).parent / "helpers"


def test_a_quarter_of_the_visual_tokens_answers_as_well() -> None:
    given = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HELPERS), *sys.path])}
    command = [sys.executable, str(HELPERS / "run_embedded.py"), json.dumps(CARDS)]
    done = subprocess.run(command, env=given, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    reference = Reference(embedded.assemble())
    for (count, ask), found in zip(CARDS, json.loads(done.stdout.splitlines()[-1]), strict=True):
        sample = embedded.sample_prompt(count, ask=ask)
        prompt = {"prompt": sample.text, "multi_modal_data": {"image": sample.images}}
        expected = reference.log_probabilities(prompt, found["kept"], found["tokens"])
        check(expected, found["tokens"], found["chosen"])
        assert found["text"].strip().startswith(sample.answer)
        assert len(found["kept"]) < 0.5 * found["prompt"]
        assert len(found["freed"]) == (found["prompt"] - len(found["kept"])) // 32

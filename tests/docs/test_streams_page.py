"""The example of the page about streams."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import families
import pytest
import tiny_folder

import foveakv

PAGE = Path(__file__).parents[2] / "docs" / "streams.md"


def run() -> dict[str, Any]:
    source = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf8"), re.M | re.S)
    assert len(source) == 1
    scope: dict[str, Any] = {}
    exec(compile(source[0], "example", "exec"), scope)
    return scope


def test_example_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foveakv, "load", lambda name: (families.build("llava"), tiny_folder.processor()), raising=False)
    assert run()["stream"].report.frames == 8


@pytest.mark.demo
def test_example_runs_with_the_embedded_model(capsys: pytest.CaptureFixture[str]) -> None:
    scope = run()
    output = capsys.readouterr().out
    # It names the card; which digit it reads may hang on a near tie.
    assert scope["sample"].captions[0].split(":")[0] in output
    assert scope["stream"].report.bytes < scope["stream"].report.highest_bytes

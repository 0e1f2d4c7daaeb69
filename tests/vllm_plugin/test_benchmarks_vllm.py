"""The benchmarks with vLLM run in their quick mode."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from benchmarks import vllm_tables
from benchmarks.__main__ import app

pytestmark = pytest.mark.demo


def run(name: str, out: Path) -> list[dict[str, Any]]:
    result = CliRunner().invoke(app, ["run", name, "--quick", "--out", str(out)])
    assert result.exit_code == 0, f"{result.output}\n{result.exception!r}"
    rows: list[dict[str, Any]] = json.loads((out / f"{name}.json").read_text())["rows"]
    return rows


def test_load(tmp_path: Path) -> None:
    rows = run("vllm", tmp_path)
    plain, own, scoring = rows
    assert (plain["part"], own["part"], scoring["part"]) == ("load", "load", "scoring")
    assert plain["leaked"] == own["leaked"] == 0
    assert plain["side_by_side"] == own["side_by_side"] == 2
    assert 0 < scoring["scoring_share"]["median"] < 1
    for make in (vllm_tables.load, vllm_tables.scoring):
        head, lines = make(rows)
        assert {len(line) for line in lines} == {len(head)}


def test_accuracy(tmp_path: Path) -> None:
    rows = run("vllm_accuracy", tmp_path)
    assert [row["side"] for row in rows] == ["full", "hae 0.2"]
    assert all(row["same_kept"] == row["same_tokens"] == 1 for row in rows)
    assert rows[0]["stored"] == 1 > rows[1]["stored"]
    head, lines = vllm_tables.accuracy(rows)
    assert {len(line) for line in lines} == {len(head)}

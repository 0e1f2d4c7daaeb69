"""Streams of cards: items, scores, the run that goes on where it ended, and its table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_folder

from foveakv.errors import InputError
from foveakv.evaluation import streams
from foveakv.evaluation.stream_items import FRAMES, TASKS, draw, score


def test_equal_numbers_give_equal_streams() -> None:
    one, again, other = draw(3), draw(3), draw(4)
    assert [task for task, _ in one.questions] == ["recall"] * 4 + ["latest", "order", "counting"]
    assert one.questions == again.questions != other.questions
    assert all(np.array_equal(a, b) for a, b in zip(one.frames, again.frames, strict=True))
    assert len(one.frames) == len(one.captions) == len(set(one.captions)) == FRAMES
    recalled = {turn.facts[0].split(":")[0] for task, turn in one.questions if task == "recall"}
    assert recalled < {caption.split(":")[0] for caption in one.captions[: FRAMES // 2]}
    latest = next(turn for task, turn in one.questions if task == "latest")
    assert latest.facts[0].startswith(one.captions[-1].strip())


def test_scores() -> None:
    questions = dict(draw(0, frames=3, recall=1).questions)
    order = questions["order"]
    digits = order.facts
    assert score("order", order, ", ".join(digits)) == score("counting", order, "1, 2, 3") == 1
    assert score("order", order, f"{digits[0]}, x") == pytest.approx(1 / 3)
    assert score("counting", order, "1, 2") == score("counting", order, "") == 0
    assert score("latest", questions["latest"], questions["latest"].answer) == 1


def test_a_run_continues(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    small = {"frames": 5, "recall": 2}
    monkeypatch.setattr(streams, "draw", lambda number, split: draw(number, split=split, **small))
    folder, out = tiny_folder.save(tmp_path / "model"), tmp_path / "out"
    common = ["--out", str(out), "--model", str(folder), "--methods", "newest_frames,infinipotv", "--blocks", "2"]
    streams.main([*common, "--items", "1"])
    first = (out / "results.jsonl").read_text(encoding="utf8")
    assert len(first.splitlines()) == 3
    streams.main([*common, "--items", "2"])
    second = (out / "results.jsonl").read_text(encoding="utf8")
    assert second.startswith(first)
    assert len(second.splitlines()) == 6
    shown = capsys.readouterr().out
    assert "2 streams" in shown
    rows = [json.loads(line) for line in second.splitlines()]
    assert {row["blocks"] for row in rows} == {None, 2}
    assert all(set(row["scores"]) == set(TASKS) for row in rows)
    full, newest = (next(row for row in rows if row["method"] == name) for name in ("full", "newest_frames"))
    assert newest["bytes"] < full["bytes"]
    assert newest["tokens"] == full["tokens"]


def result(item: int, method: str, blocks: int | None, right: float) -> dict[str, Any]:
    budget = None if blocks is None else blocks * 70
    scores = dict.fromkeys(TASKS, right)
    return {"item": item, "method": method, "blocks": blocks, "budget": budget, "scores": scores, "bytes": 2e6,
            "highest_bytes": 3e6}  # fmt: skip


def test_the_table_compares_on_the_same_streams() -> None:
    results = [result(i, "full", None, 1) for i in range(3)] + [result(i, "newest_frames", 4, i / 2) for i in range(2)]
    lines = streams.table(results).splitlines()
    assert lines[2] == "| full | all | 100 | 100 | 100 | 100 | 2.0 | 3.0 |"
    assert lines[3] == "| newest_frames | 4 | 25 | 25 | 25 | 25 | 2.0 | 3.0 |"
    assert lines[-1].startswith("2 streams")
    with pytest.raises(InputError, match="no stream"):
        streams.table([])

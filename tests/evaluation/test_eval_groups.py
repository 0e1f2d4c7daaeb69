"""Comparisons at equal bytes, series without a budget, and means of groups of tasks."""

from __future__ import annotations

import json

import pytest
from small_runs import result, run, scores

from foveakv.evaluation import equal_bytes
from foveakv.evaluation.plan import Entry, Plan
from foveakv.evaluation.report.tables import at_equal_bytes, leaderboard, leaderboard_json
from foveakv.evaluation.results import Result
from foveakv.evaluation.summary import Summary


def bytes_of(label: str, score: float, stored: int, host: int = 0, task: str = "t") -> list[Result]:
    """Six items with a score and bytes of 1000."""
    return [result(label, n, score, task, stored_bytes=stored, full_bytes=1000, host_bytes=host) for n in range(6)]


def test_equal_bytes_are_interpolated_and_never_extrapolated() -> None:
    """Between 5% and 20% of the bytes, 10% is in the middle of the logarithms."""
    summary = run(
        *bytes_of("full", 1.0, 1000), *bytes_of("a 0.05", 0.4, 50), *bytes_of("a 0.2", 0.8, 200),
        *bytes_of("b 0.05", 0.9, 50, host=450), *bytes_of("b 0.2", 1.0, 150, host=350),
        *bytes_of("random 0.05", 0.0, 50),
        labels=("full", "a 0.05", "a 0.2", "b 0.05", "b 0.2", "random 0.05"), items=6,
    )  # fmt: skip
    total, stored = equal_bytes.table(summary, "total"), equal_bytes.table(summary, "stored")
    assert list(total["a"]) == [0.05, 0.1, 0.15, 0.2]
    assert total["a"][0.1].accuracy.mean == pytest.approx(0.6)
    assert total["a"][0.1].labels == ("a 0.05", "a 0.2")
    assert total["a"][0.2].labels == ("a 0.2",)
    assert list(total["b"]) == [0.5]
    assert list(stored["b"]) == [0.05, 0.1, 0.15]
    assert "full" not in total
    rows = {row[0].main: row for row in at_equal_bytes(summary, "stored").rows}
    assert [cell.main for cell in rows["a"]] == ["a", "40.0", "60.0", "71.7", "80.0"]
    assert [cell.kind for cell in rows["b"]] == ["", "better", "better", "better", "muted"]
    json.dumps(leaderboard_json(summary), allow_nan=False)


def test_sizes_without_a_budget_are_one_series() -> None:
    """HAE without DDES takes no budget: `target_visual_tokens` is its size, and the end of its label."""
    both = [
        Result("t", n, 0, "hae", None, f"hae {size}", {"target_visual_tokens": size}, score=size)
        for size in (0.15, 0.4)
        for n in range(2)
    ]
    entries = [Entry("full", "full", {}), *(Entry(r.label, "hae", r.settings) for r in both[::2])]
    summary = Summary(Plan(("t",), tuple(entries), 2), [*scores("full", 1.0, 0.9), *both])
    assert [(c.label, c.series, c.budget) for c in summary.candidates[1:]] == [
        ("hae 0.15", "hae", None), ("hae 0.4", "hae", None),
    ]  # fmt: skip
    assert [row[0].main for row in leaderboard(summary.boards[0], summary).rows] == ["full", "hae 0.4", "hae 0.15"]


def test_a_mean_of_every_group() -> None:
    labels = ("full", "a 0.1", "random 0.1")
    made = [
        one
        for task, score in (("n1", 1.0), ("n2", 0.8), ("list", 0.3))
        for label, value in zip(labels, (1.0, score, 0.0), strict=True)
        for one in scores(label, *[value] * 6, task=task)
    ]
    entries = run(*made, labels=labels, items=6).plan
    summary = Summary(entries, made, groups={"n1": "needles", "n2": "needles", "list": "lists"})
    assert summary.groups == {"needles": ["n1", "n2"], "lists": ["list"]}
    row = next(row for row in summary.boards[0].rows if row.candidate.label == "a 0.1")
    assert {group: round(found.mean, 3) for group, found in row.groups.items()} == {"needles": 0.9, "lists": 0.3}
    assert row.groups["lists"].low < 0.3 < row.groups["lists"].high
    table = leaderboard(summary.boards[0], summary)
    assert table.columns[3:5] == ("needles, %", "lists, %")
    assert Summary(entries, made, groups=dict.fromkeys(("n1", "n2", "list"), "needles")).groups == {}

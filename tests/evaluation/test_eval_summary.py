# ruff: noqa: RUF001 - the minus signs and dashes are those of the report
"""Figures of an evaluation: every kind computed by hand once, and the rules about what may rank."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from small_runs import result, run, scores

from foveakv.evaluation.bootstrap import Interval
from foveakv.evaluation.figures import Candidate
from foveakv.evaluation.plan import Entry, Plan
from foveakv.evaluation.report import headline
from foveakv.evaluation.report.tables import (
    accuracy,
    change,
    chunks,
    items,
    leaderboard,
    leaderboard_json,
    matrix,
    percent,
    signed,
    small_number,
    task_states,
    task_table,
)
from foveakv.evaluation.summary import Summary


def tiny() -> Summary:
    """Two items with all their figures; the method's second item has no full cache's time."""
    return run(
        result("full", 0, 1.0, stored_bytes=100, full_bytes=100, peak_bytes=100, token_seconds=0.010, match=1.0),
        result("full", 1, 0.8, stored_bytes=300, full_bytes=300, peak_bytes=300, token_seconds=None, match=1.0),
        result(
            "a 0.1", 0, 0.5, stored_bytes=20, full_bytes=100, peak_bytes=60, host_bytes=2000, token_seconds=0.004,
            match=0.5, kl=0.3, scored=1, retrieved=10, hits=5, log_likelihood=-1.0,
        ),
        result(
            "a 0.1", 1, 0.7, stored_bytes=40, full_bytes=300, peak_bytes=90, host_bytes=4000, token_seconds=0.005,
            match=1.0, kl=0.1, scored=3, retrieved=30, hits=25, log_likelihood=-0.5,
        ),
        *scores("random 0.1", 0.0, 0.1),
        items=2,
    )  # fmt: skip


def test_every_figure_of_a_cell() -> None:
    cell = tiny().cells["t", "a 0.1"]
    assert (cell.n, cell.planned, cell.failed, cell.complete) == (2, 2, 0, True)
    assert cell.accuracy.mean == pytest.approx((0.5 + 0.7) / 2)
    assert cell.change.mean == pytest.approx(((0.5 - 1.0) + (0.7 - 0.8)) / 2)
    assert cell.match == pytest.approx(0.75)
    assert cell.kl == pytest.approx((0.3 * 1 + 0.1 * 3) / 4)  # per token, not per item
    assert cell.scored == 4
    assert cell.log_likelihood == pytest.approx(-0.75)
    assert cell.stored == pytest.approx((20 + 40) / (100 + 300))
    assert cell.peak == pytest.approx(150 / 400)
    assert cell.host == 3000
    assert cell.total == pytest.approx((20 + 40 + 2000 + 4000) / 400)
    assert cell.host_share == pytest.approx(6000 / 400)
    assert cell.time == pytest.approx(0.4)  # the item with both times
    assert cell.retrieved == 20
    assert cell.hits == pytest.approx(30 / 40)


def test_the_table_shows_these_figures() -> None:
    summary = tiny()
    table = task_table(summary, "t", summary.budgets[0])
    assert table.title == "t, 10%"
    assert [row[0].main for row in table.rows] == ["full", "a", "random"]
    full, a, _ = table.rows
    assert [cell.main for cell in a] == [
        "a", "2", "60.0", "▼ −30.0", "75.0", "0.15", "4", "15.0", "37.5", "1500.0", "1515.0", "0.40", "−0.750",
    ]  # fmt: skip
    assert a[2].small == "[50.0, 70.0]"
    assert a[3].small == "[−50.0, −10.0]"
    assert a[3].kind == "worse"
    assert [cell.main for cell in full[:4]] == ["full", "2", "90.0", "–"]


def test_leaderboard_by_hand() -> None:
    summary = run(
        *scores("full", 1.0, 1.0, 1.0, 0.8, task="t"), *scores("full", 1.0, 1.0, task="u"),
        *scores("a 0.1", 0.5, 0.9, 0.8, 0.6, task="t"), *scores("a 0.1", 1.0, 0.4, task="u"),
        *scores("b 0.1", 1.0, 1.0, 0.9, 0.8, task="t"), *scores("b 0.1", 0.9, 0.9, task="u"),
        *scores("random 0.1", 0.0, 0.0, 0.1, 0.1, task="t"), *scores("random 0.1", 0.1, 0.3, task="u"),
        labels=("full", "a 0.1", "b 0.1", "random 0.1"),
    )  # fmt: skip
    (board,) = summary.boards
    assert [(row.candidate.label, row.rank) for row in board.rows] == [
        ("full", None), ("b 0.1", 1), ("a 0.1", 2), ("random 0.1", 3),
    ]  # fmt: skip
    a = board.rows[2]
    assert a.score == pytest.approx((0.7 + 0.7) / 2)  # tasks count the same: 0.7 of four items, 0.7 of two
    assert a.change.mean == pytest.approx(0.7 / ((0.95 + 1.0) / 2) - 1)
    assert a.floor is not None
    assert a.floor.mean == pytest.approx(((0.7 - 0.05) + (0.7 - 0.2)) / 2)
    assert a.n == 6
    assert a.short == ("u",)
    table = leaderboard(board, summary)
    assert [cell.main for cell in table.rows[2][:3]] == ["a", "2", "70.0"]
    assert table.rows[3][0].small == "floor"
    assert "a 0.1 has fewer items than planned on u" in table.notes


def test_equal_methods_share_a_rank() -> None:
    parts = [scores("full", 1.0, 1.0), scores("random 0.1", 0.0, 0.1)]
    parts += [scores(f"{name} 0.1", *values) for name, values in {"a": (0.5, 0.9), "b": (0.9, 0.5)}.items()]
    summary = run(*(one for part in parts for one in part), labels=("full", "a 0.1", "b 0.1", "random 0.1"))
    assert [row.rank for row in summary.boards[0].rows] == [None, 1, 1, 3]


def test_a_candidate_without_a_ranking_task_has_no_rank() -> None:
    summary = run(
        *scores("full", 1.0, 1.0, task="t"), *scores("full", 1.0, 1.0, task="u"),
        *scores("random 0.1", 0.0, 0.1, task="t"), *scores("random 0.1", 0.0, 0.1, task="u"),
        *scores("a 0.1", 1.0, 1.0, task="t"),
    )  # fmt: skip
    rows = summary.boards[0].rows
    assert [(row.candidate.label, row.rank, row.missing) for row in rows] == [
        ("full", None, ()), ("random 0.1", 1, ()), ("a 0.1", None, ("u",)),
    ]  # fmt: skip


def test_ranks_follow_the_loss_on_common_items() -> None:
    """`a` has the easy items alone: its mean is higher, its loss on them as well."""
    summary = run(
        *scores("full", 1.0, 1.0, 1.0, 0.6), *scores("random 0.1", 0.0, 0.1, 0.0, 0.0),
        *scores("a 0.1", 0.9, 0.9), *scores("b 0.1", 1.0, 1.0, 0.9, 0.5),
        labels=("full", "a 0.1", "b 0.1", "random 0.1"),
    )  # fmt: skip
    rows = {row.candidate.label: row for row in summary.boards[0].rows}
    assert rows["a 0.1"].score > rows["b 0.1"].score
    assert (rows["a 0.1"].rank, rows["b 0.1"].rank) == (2, 1)
    assert rows["a 0.1"].change.mean == pytest.approx(-0.1)


def test_a_change_that_is_no_number_comes_last() -> None:
    """`a` has only the item on which the full cache gets nothing."""
    summary = run(
        *scores("full", *[1.0] * 9, 0.0), *scores("random 0.1", *[0.0] * 10), result("a 0.1", 9, 0.0),
        *scores("b 0.1", *[0.5] * 10), *scores("c 0.1", *[0.9] * 10), items=10,
        labels=("full", "b 0.1", "a 0.1", "c 0.1", "random 0.1"),
    )  # fmt: skip
    assert [(row.candidate.label, row.rank) for row in summary.boards[0].rows] == [
        ("full", None), ("c 0.1", 1), ("b 0.1", 2), ("random 0.1", 3), ("a 0.1", None),
    ]  # fmt: skip


def test_weak_and_blind_tasks_do_not_rank() -> None:
    summary = run(
        *scores("full", 0.8, 0.8, task="weak"), *scores("random 0.1", 0.0, 0.1, task="weak"),
        *scores("full", 1.0, 0.9, 1.0, task="blind"), *scores("random 0.1", 0.9, 1.0, 0.95, task="blind"),
        *scores("full", 1.0, 0.9, task="good"), *scores("random 0.1", 0.1, 0.2, task="good"),
        *scores("full", 0.9, 0.8, task="odd"), *scores("random 0.1", 1.0, 1.0, task="odd"),
    )  # fmt: skip
    assert summary.ranked == ["good"]
    assert summary.states["weak"].reasons == ["full accuracy is under 85%: not used to rank"]
    assert summary.states["blind"].reasons == [
        "cannot tell the full cache from random: says nothing about methods, not used to rank"
    ]
    assert summary.states["odd"].reasons == summary.states["blind"].reasons
    assert [row[4].main for row in task_states(summary).rows] == [
        "not used to rank",
        "not used to rank",
        "ranks methods",
        "not used to rank",
    ]


def test_full_at_the_limit_ranks() -> None:
    summary = run(*scores("full", 0.8, 0.9), *scores("random 0.1", 0.1, 0.1))
    assert summary.states["t"].full.mean == pytest.approx(0.85)
    assert summary.ranked == ["t"]
    assert run(*scores("full", 0.85, 0.85), *scores("random 0.1", 0.0, 0.1)).ranked == ["t"]


def test_the_floor_is_random_at_the_smallest_budget() -> None:
    summary = run(
        *scores("full", 1.0, 1.0), *scores("random 0.5", 1.0, 1.0), *scores("random 0.05", 0.0, 0.2),
        labels=("full", "random 0.5", "random 0.05"),
    )  # fmt: skip
    assert summary.states["t"].floor_label == "random 0.05"
    assert summary.ranked == ["t"]


def test_without_random_there_is_a_note() -> None:
    summary = run(*scores("full", 1.0, 1.0), *scores("a 0.1", 1.0, 0.5), labels=("full", "a 0.1"))
    assert summary.states["t"].reasons == ["random was not run here: there is no floor to check against"]
    assert (
        "random was not run at this budget, so there is no floor here" in leaderboard(summary.boards[0], summary).notes
    )


def test_errors_count_nowhere_but_as_failures() -> None:
    summary = run(
        *scores("full", 1.0, 1.0, 1.0), *scores("a 0.1", 0.5, 0.5), result("a 0.1", 2, None, error="E: broke"),
        *scores("random 0.1", 0.0, 0.0, 0.0), items=3,
    )  # fmt: skip
    cell = summary.cells["t", "a 0.1"]
    assert (cell.n, cell.failed, cell.complete) == (2, 1, False)
    assert cell.accuracy.mean == 0.5
    assert cell.change.n == 2
    assert [(f.error, f.cases) for f in summary.failures] == [("E: broke", (("t", 2, "a 0.1"),))]
    row = task_table(summary, "t", summary.budgets[0]).rows[1]
    assert (row[1].main, row[1].small) == ("2 of 3", "1 failed")


def test_a_method_that_does_not_apply_neither_fails_nor_is_missing() -> None:
    error = "NoVisualTokensError: random drops visual tokens only"
    summary = run(
        *scores("full", *[1.0] * 20), *scores("a 0.1", *[1.0] * 19),
        *(result("random 0.1", item, None, error=error) for item in range(20)), items=20,
    )  # fmt: skip
    cell = summary.cells["t", "random 0.1"]
    assert (cell.n, cell.failed, cell.skipped, cell.complete) == (0, 0, 20, True)
    assert summary.failures == []
    assert str(items(cell)) == "0 20 do not apply"
    found = headline.warnings(summary)
    assert found[0].startswith("This run is incomplete: 1 of 3 cells")  # a lacks an item
    assert not any("ended with an error" in line for line in found)
    assert "Some cells have fewer than 20 items; their intervals are too narrow." in found
    assert "and 20 not applicable" in dict(headline.facts(summary, []))["results"]


def test_a_run_of_several_makes_says_so() -> None:
    summary = run(*scores("full", *[1.0] * 20), *scores("a 0.1", *[1.0] * 20), items=20)

    def start(torch: str, folder: str) -> dict[str, Any]:
        machine = {"versions": {"torch": torch, "ray": "2.0"}, "model": {"name": folder, "dtype": "float32"}}
        return {"machines": [machine]}

    same = [start("2.13.0", "/here/demo-1"), start("2.13.0", "/there/demo-1")]
    assert not any("made differently" in line for line in headline.warnings(summary, same))
    found = headline.warnings(summary, [*same, start("2.14.0", "/here/demo-2")])
    assert found[0] == (
        "Parts of this run used different setups: torch was 2.13.0 and 2.14.0; the model was demo-1 and demo-2. "
        "Figures may not be comparable."
    )


def test_failures_are_grouped_by_their_text() -> None:
    summary = run(
        *scores("full", 1.0), result("a 0.1", 0, None, error="x"), result("a 0.1", 1, None, error="y"),
        result("random 0.1", 1, None, error="y"),
    )  # fmt: skip
    assert [(f.error, len(f.cases)) for f in summary.failures] == [("y", 2), ("x", 1)]
    assert summary.failures[0].headline == "2 results: a 0.1, random 0.1 on t"
    assert summary.failures[1].headline == "1 result: a 0.1 on t"


def test_matrix_by_hand() -> None:
    summary = run(
        *scores("full", 1.0, 1.0), *scores("a 0.1", 0.9, 0.7), *scores("b 0.1", 0.5, 0.6),
        labels=("full", "a 0.1", "b 0.1"),
    )  # fmt: skip
    found = summary.differences(summary.budgets[0], ["t"])
    assert found.labels == ("a 0.1", "b 0.1")
    assert found.at(0, 1).mean == pytest.approx((0.4 + 0.1) / 2)
    assert found.at(1, 0) == Interval(-found.at(0, 1).mean, -found.at(0, 1).high, -found.at(0, 1).low, 2)
    table = matrix(found, "t", {"a 0.1": "a", "b 0.1": "b"})
    assert [[str(cell) for cell in row] for row in table.rows] == [
        ["a", "", "▲ +25.0 [+10.0, +40.0]"],
        ["b", "▼ −25.0 [−40.0, −10.0]", ""],
    ]
    assert table.notes[0] == "2 common items for every pair"
    assert table.notes[1].startswith("1 of 1 pairs are marked")


def test_static_heads_are_means_over_items_and_equal_maps_are_joined() -> None:
    maps = [[[1, 0], [1, 1]], [[1, 0], [0, 1]]]
    both = [
        result(label, item, 1.0, details={"static_heads": maps[item]})
        for label in ("a 0.1", "a 0.2")
        for item in (0, 1)
    ]
    summary = run(*scores("full", 1.0, 1.0), *both, result("b 0.1", 0, 1.0, details={"static_heads": [[1]]}),
                  labels=("full", "a 0.1", "a 0.2", "b 0.1"))  # fmt: skip
    first, second = summary.static_heads
    assert (first.labels, first.share.tolist(), first.items) == (("a 0.1", "a 0.2"), [[1, 0], [0.5, 1]], 2)
    assert (second.labels, second.share.tolist()) == (("b 0.1",), [[1]])


def test_retrieved_chunks() -> None:
    table = chunks(tiny())
    assert table is not None
    assert [[cell.main for cell in row] for row in table.rows] == [["a", "10%", "2", "20", "75.0", "3.0 kB"]]
    assert chunks(run(*scores("full", 1.0))) is None


def test_budgets_are_sorted_and_distinguished() -> None:
    labels = ("full", "a 0.5", "a 64", "a 0.1", "b 10%")
    entries = tuple(
        Entry(label, label.split(" ")[0], {"budget": budget} if budget else {})
        for label, budget in zip(labels, (None, 0.5, 64, 0.1, "10%"), strict=True)
    )
    summary = Summary(Plan(("t",), entries, 1), [])
    assert [str(budget) for budget in summary.budgets] == [
        "10% of the prompt", "50% of the prompt", "64 tokens per head",
    ]  # fmt: skip
    assert [c.label for c in summary.at(summary.budgets[0])] == ["a 0.1", "b 10%"]
    assert summary.series == ["full", "a", "b"]


def test_series_of_a_label() -> None:
    assert Candidate.of("hae relative 0.1", "hae", 0.1).series == "hae relative"
    assert Candidate.of("hae", "hae", 0.1).series == "hae"
    assert Candidate.of("fastv", "fastv", None).series == "fastv"


def test_numbers_as_text() -> None:
    assert [small_number(value) for value in (None, 0, 1.234, 0.0456, 0.001, 3.21e-5, math.nan)] == [
        "–", "0", "1.23", "0.046", "0.0010", "3.2e-5", "–",
    ]  # fmt: skip
    assert [signed(value) for value in (0.123, -0.05, -0.0001, math.nan)] == ["+12.3", "−5.0", "0.0", "–"]
    assert [percent(value) for value in (0.5, -0.0001, None)] == ["50.0", "0.0", "–"]
    assert str(accuracy(Interval(0.5, math.nan, math.nan, 1))) == "50.0"
    assert [change(Interval(0.1, low, 0.2, 5)).kind for low in (0.05, 0.0, -0.1)] == ["better", "", ""]


def test_leaderboard_json_holds_plain_values() -> None:
    data = leaderboard_json(tiny())
    del data["plan"]  # tuples, which JSON has not
    assert json.loads(json.dumps(data, allow_nan=False)) == data
    assert data["ranking_tasks"] == ["t"]
    assert data["leaderboards"][0]["rows"][1]["label"] == "a 0.1"
    (cell,) = [cell for cell in data["cells"] if cell["label"] == "a 0.1"]
    assert cell["kl"] == pytest.approx(0.15)
    assert cell["change"]["n"] == 2


def test_a_control_does_not_rank() -> None:
    results = [*scores("full", 1.0, 1.0), *scores("a 0.1", 1.0, 0.0), *scores("random 0.1", 0.0, 0.1)]
    plan = run(*results).plan
    assert Summary(plan, results).ranked == ["t"]
    summary = Summary(plan, results, controls=["t"])
    assert summary.ranked == []
    assert summary.states["t"].reasons == ["a control: not used to rank"]


def test_without_a_result_of_random_there_is_no_floor_and_no_rank() -> None:
    errors = [result("random 0.1", item, None, error="x") for item in range(2)]
    state = run(*scores("full", 1.0, 1.0), *scores("a 0.1", 1.0, 0.0), *errors).states["t"]
    assert not state.ranked
    assert state.reasons == ["random has no result here, so there is no floor to check against: not used to rank"]
    state = run(*scores("full", 1.0, 1.0), *scores("a 0.1", 1.0, 0.0), labels=("full", "a 0.1")).states["t"]
    assert state.ranked
    assert state.reasons == ["random was not run here: there is no floor to check against"]


def test_the_order_of_lines_changes_no_interval() -> None:
    generator = np.random.default_rng(0)
    values = {label: generator.random(13).round(1).tolist() for label in ("full", "a 0.1", "random 0.1")}
    results = [one for label, own in values.items() for one in scores(label, *own)]
    shuffled = [results[place] for place in generator.permutation(len(results))]
    assert run(*results).cells == run(*shuffled).cells


def test_candidates_of_one_name_are_distinguished() -> None:
    def series(*entries: Entry) -> list[str]:
        return [c.series for c in Summary(Plan(("t",), entries, 1), []).candidates]

    two = Entry("a 0.1", "a", {"budget": 0.1}), Entry("a 0.3", "a", {"budget": 0.3})
    assert series(*two) == ["a", "a"]
    assert series(*two, Entry("a", "a", {"budget": 0.3, "recent": 8})) == ["a 0.1", "a 0.3", "a"]
    assert series(two[0], Entry("a 10%", "a", {"budget": "10%"})) == ["a 0.1", "a 10%"]
    assert series(two[0], Entry("a", "b", {"budget": 0.2})) == ["a 0.1", "a"]


def test_times_are_compared_with_the_full_cache_beside_them() -> None:
    full = [result("full", 0, 1.0, token_seconds=1.0, full_token_seconds=1.0)]
    later = [result("a 0.1", 0, 1.0, token_seconds=3.0, full_token_seconds=2.0)]  # on a slower day
    assert run(*full, *later).cells["t", "a 0.1"].time == 1.5

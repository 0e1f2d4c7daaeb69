"""Aims are computed from rows; only the reasons for misses are written by hand."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import report
from benchmarks.aims import AIMS
from benchmarks.scale import exponent

AIM = {aim.name: aim for aim in AIMS}


def decode_row(method: str, **fields: Any) -> dict[str, Any]:
    shared = {"geometry": "qwen2.5-vl-7b", "dtype": "fp32", "context": 32768, "budget": 0.1}
    row = {**shared, "method": method, "faster_than_packed": 1.0, "read_share": 0.5, "load": 0.0, **fields}
    return {"faster_than_packed_by_means": row["faster_than_packed"], **row}


def content(name: str, rows: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    return {"benchmark": name, "rows": rows, "quick": False, "complete": True, **fields}


def test_names_are_unique_and_reasons_belong_to_aims() -> None:
    assert len(AIM) == len(AIMS)
    assert set(report.reasons()) <= set(AIM)
    assert {aim.benchmark for aim in AIMS} <= set(report.TITLES)


def test_an_aim_is_reached_missed_or_not_measured() -> None:
    aim = AIM["decode-hae"]
    assert aim.check([]) is None
    assert aim.check([decode_row("hae", budget=0.2)]) is None
    assert aim.check([decode_row("hae", faster_than_packed=8.0)]) == (8.0, "hae", True)
    assert aim.check([decode_row("hae", faster_than_packed=7.9)]) == (7.9, "hae", False)
    assert aim.check([decode_row("hae", faster_than_packed=9.0, faster_than_packed_by_means=7.0)]) == (
        7.0,
        "hae",
        False,
    )


def test_the_worst_method_decides() -> None:
    name = "peak_over_layer_plus_stored"
    rows = [{"budget": 0.1, "method": "hae", name: 1.0}, {"budget": 0.1, "method": "hybridkv", name: 1.6}]
    assert AIM["memory-peak"].check(rows) == (1.6, "highest: hybridkv", False)
    assert AIM["memory-peak"].check(rows[:1]) == (1.0, "highest: hae", True)


def test_a_share_is_at_most_its_aim() -> None:
    rows = [{"part": "overhead", "context": 8192, "method": "hae", "own_share": 0.02}]
    rows += [{"part": "overhead", "context": 8192, "method": "plain"}]
    assert AIM["prefill-8k-hae"].check(rows) == (0.02, "hae", True)
    assert AIM["prefill-8k-h2o"].check(rows) is None


def test_many_requests_are_compared_within_one_length_of_answers() -> None:
    rows = [
        {"tokens": 96, "method": name, "side_by_side": together, "tokens_per_second": speed}
        for name, together, speed in (
            ("one at a time", 1, 10.0),
            ("full", 2, 15.0),
            ("hae", 10, 25.0),
            ("snapkv", 9, 35.0),
        )
    ]
    assert AIM["serving-together-96"].check(rows) == (4.5, "lowest: snapkv", False)
    assert AIM["serving-speed-96"].check(rows) == (2.5, "lowest: hae", False)
    assert AIM["serving-speed-256"].check(rows) is None


def test_flushes_count_in_the_time_per_token() -> None:
    row = {
        "model": "demo",
        "asked": 32768,
        "budget": 0.1,
        "batch": 1,
        "method": "hae",
        "best_full_path": "full",
        "faster_than_best_full": 2.0,
        "faster_than_best_full_by_means": 1.4,
    }
    assert AIM["token-hae-demo"].check([row]) == (1.4, "against full", False)


def test_misses_are_listed_with_their_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "reasons", lambda: {"decode-hae": "Because."})
    rows = [decode_row("hae", faster_than_packed=2.0), decode_row("snapkv", faster_than_packed=9.0)]
    text = report._aims([content("decode_attention", rows)])
    assert "| 2.00x | **missed** |" in text
    assert "| 9.00x | reached |" in text
    assert "full cache: 2.00x. Because." in text
    assert "50.0%. No reason given yet." in text


def test_quick_rows_reach_nothing() -> None:
    rows = [decode_row("hae", faster_than_packed=20.0)]
    assert "reached" not in report._aims([content("decode_attention", rows, quick=True)])


def test_exponent() -> None:
    assert exponent([1, 2, 4], [3, 6, 12]) == pytest.approx(1)
    assert exponent([1, 2, 4], [5, 5, 5]) == pytest.approx(0)
    assert exponent([10, 100, 1000], [1, 100, 10000]) == pytest.approx(2)

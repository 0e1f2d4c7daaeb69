"""The benchmark of pages runs on tiny sizes and writes what it measured."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks import pages


def test_runs_on_tiny_sizes(tmp_path: Path) -> None:
    out = tmp_path / "pages.json"
    pages.main(
        context=[200], page_size=[16], geometry="demo", dtype="fp32", kv_dtype="int8", repeats=2, seed=0, out=out
    )
    rows = json.loads(out.read_text(encoding="utf8"))["rows"]
    assert len(rows) == 6 * 4
    assert {row["side"] for row in rows} == {"contiguous", "paged", "paged, used pool", "paged, scattered"}
    assert all(row["ms"]["median"] > 0 and row["times_contiguous"] > 0 for row in rows)

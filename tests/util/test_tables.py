"""Tables: every entry can be read at any width."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from rich.text import Text

from foveakv.util.tables import Column, FittedTable

TITLES = ("same", "stored", "prefill", "traces with bin <= greedy")


def table() -> FittedTable:
    columns = [Column("method", right=False), Column("answer", text=True, widest=32, right=False)]
    made = FittedTable([*columns, *map(Column, TITLES)], title="a title " * 12, caption="the caption")
    made.add(
        "hybridkv 0.1", "[b]an answer[/b] of many words, all of which can be read", "100%", "1.23 MB", "0.12 s", "7"
    )
    made.add("snapkv 0.2", Text("unbreakable" * 5), "50%", "9 kB\n+ 1 MB host", "3 s", "-", style="bold")
    made.end_section()
    return made


def printed(width: int) -> str:
    console = Console(width=width, file=io.StringIO(), color_system=None)
    console.print(table())
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


@pytest.mark.parametrize("width", [20, 40, 60, 80, 100, 120, 200])
def test_nothing_is_cut_off(width: int) -> None:
    text = printed(width)
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    letters = "".join(text.split())
    for entry in ("hybridkv0.1", "snapkv0.2", "100%", "thecaption"):
        assert entry in letters
    for word in ("unbreakable"[:8], "answer", "greedy", "9 kB", "+ 1 MB"):
        assert word in text
    assert "[b]" in text  # entries are no markup


def test_narrow_tables_are_stacked_and_wide_ones_are_not() -> None:
    assert "─" not in printed(60)
    assert "─" in printed(120)
    lines = [line.strip() for line in printed(60).splitlines()]
    assert any(line.split() == ["same", "100%"] for line in lines)


def test_a_table_without_rows_and_headings() -> None:
    made = FittedTable([Column(""), Column("")])
    console = Console(width=40, file=io.StringIO())
    console.print(made)
    made.add("name", "value")
    console.print(made)
    assert "name" in console.file.getvalue()  # type: ignore[attr-defined]


def test_a_row_has_an_entry_per_column() -> None:
    with pytest.raises(ValueError, match="6 columns and 1 entries"):
        table().add("x")

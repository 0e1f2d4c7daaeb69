"""Tables for terminals of any width: columns where they fit, one block per row where they do not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich import box
from rich.cells import cell_len
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

NARROWEST = 12
"""The narrowest width of a column of texts, in cells; below it the table is stacked."""


@dataclass(frozen=True)
class Column:
    """A column of a `FittedTable`.

    Attributes:
        title: the heading; it may be empty.
        text: whether entries are texts that wrap. Other entries, figures for example, stay on one line.
        widest: the largest width of a column of texts, in cells; None for any.
        right: whether entries are aligned to the right.
    """

    title: str
    text: bool = False
    widest: int | None = None
    right: bool = True


class FittedTable:
    """A table in which every entry can be read at any width: nothing is cut off.

    Columns get their natural width if the console is wide enough; else headings wrap at spaces and texts wrap down to
    `NARROWEST` cells; else each row becomes a block with one line per column. A rich renderable.

    Args:
        columns: the columns, from left to right; the first one names the rows.
        title: a line above the table.
        caption: a line below it.
    """

    def __init__(self, columns: Sequence[Column], *, title: str = "", caption: str = "") -> None:
        self.columns = list(columns)
        self.title, self.caption = title, caption
        self.rows: list[list[Text]] = []
        self._sections: set[int] = set()

    def add(self, *entries: str | Text, style: str = "") -> None:
        """Add a row: one entry per column. Strings are plain text, not markup. `style` applies to the whole row."""
        if len(entries) != len(self.columns):
            raise ValueError(f"{len(self.columns)} columns and {len(entries)} entries")
        row = [entry.copy() if isinstance(entry, Text) else Text(entry) for entry in entries]
        for entry in row:
            if style:
                entry.stylize_before(style)
        self.rows.append(row)

    def end_section(self) -> None:
        """Draw a line below the last row."""
        self._sections.add(len(self.rows) - 1)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self.title:
            yield Text(self.title, style="italic")
        widths = self._widths(options.max_width - self._overhead(console, options))
        if widths is None:
            yield from self._stacked()
        else:
            yield self._table(widths)
        if self.caption:
            yield Text(self.caption, style="dim italic")

    def _overhead(self, console: Console, options: ConsoleOptions) -> int:
        """The cells that borders and padding take."""
        ones = [1] * len(self.columns)
        return console.measure(self._table(ones, empty=True), options=options.update(width=10_000)).maximum - sum(ones)

    def _widths(self, room: int) -> list[int] | None:
        """The widths of the columns in `room` cells, or None if they do not fit."""
        natural, least = [], []
        for i, column in enumerate(self.columns):
            entries = max((cell_len(line) for row in self.rows for line in row[i].plain.split("\n")), default=0)
            entries = min(entries, column.widest or entries)
            natural.append(max(entries, cell_len(column.title), 1))
            words = max((cell_len(word) for word in column.title.split()), default=1)
            least.append(max(words, min(entries, NARROWEST) if column.text else entries))
        spare = room - sum(least)
        if spare < 0:
            return None
        widths = list(least)
        # Texts are widened before headings.
        for i in sorted(range(len(widths)), key=lambda i: not self.columns[i].text):
            more = min(spare, natural[i] - least[i])
            widths[i], spare = widths[i] + more, spare - more
        return widths

    def _table(self, widths: Sequence[int], *, empty: bool = False) -> Table:
        table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), show_header=any(column.title for column in self.columns))
        for column, width in zip(self.columns, widths, strict=True):
            title = Text("" if empty else column.title)
            table.add_column(title, justify="right" if column.right else "left", width=width, overflow="fold")
        for i, row in enumerate([] if empty else self.rows):
            table.add_row(*row, end_section=i in self._sections)
        return table

    def _stacked(self) -> RenderResult:
        """Every row as a block: the first entry, then a line per column with its title and entry."""
        for name, *entries in self.rows:
            block = Table.grid(padding=(0, 2, 0, 0))
            block.add_column(overflow="fold", ratio=2)
            block.add_column(overflow="fold", ratio=3)
            for column, entry in zip(self.columns[1:], entries, strict=True):
                if entry.plain.strip():
                    block.add_row(Padding(Text(column.title), (0, 0, 0, 2)), entry)
            name.overflow = "fold"
            yield from (Text(), name, block)

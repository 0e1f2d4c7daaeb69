"""The tables of a report as plain values, for the page, the Markdown file and leaderboard.json."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, Literal

from foveakv.core.budget import Budget
from foveakv.evaluation import equal_bytes
from foveakv.evaluation.bootstrap import Interval
from foveakv.evaluation.figures import FLOOR, Board, Candidate, Cell, Differences
from foveakv.evaluation.results import FULL
from foveakv.evaluation.summary import Summary
from foveakv.util.texts import size_text

NONE = "\u2013"  # an en dash: no figure
_MINUS = "\u2212"  # as wide as a plus

Kind = Literal["", "better", "worse", "muted"]


@dataclass(frozen=True)
class Text:
    """A cell of a table. small: shown after it in grey. kind: how it is marked. series: shows its line sample first."""

    main: str
    small: str = ""
    kind: Kind = ""
    series: str | None = None

    def __str__(self) -> str:
        return f"{self.main} {self.small}".rstrip()


@dataclass(frozen=True)
class Table:
    """A table. columns: their titles. words: the columns of left-aligned text; all others are right-aligned numbers.

    grid: a matrix, shown with narrow cells and the small part on a separate line.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Text, ...], ...]
    notes: tuple[str, ...] = ()
    words: frozenset[int] = frozenset({0})
    grid: bool = False


def budget_text(budget: Budget | None) -> str:
    """A budget as text: 10%, 1,024 tokens, 536.9 MB."""
    if budget is None:
        return "no budget"
    if budget.kind == "ratio":
        return f"{float(100 * budget.value):.6g}%"
    return f"{int(budget.value):,} tokens" if budget.kind == "tokens" else size_text(float(budget.value))


def candidate_text(candidate: Candidate) -> Text:
    """The series of a candidate, for tables whose title has the budget; without a budget its label."""
    return Text(candidate.series if candidate.budget else candidate.label, series=candidate.series)


def number(value: float | None, digits: int = 2) -> str:
    """A number with a fixed number of digits; a dash if unknown."""
    return NONE if value is None or math.isnan(value) else f"{value:.{digits}f}".replace("-", _MINUS)


def percent(value: float | None, digits: int = 1) -> str:
    """A share as percent, without the sign; a dash if unknown."""
    return NONE if value is None or math.isnan(value) else f"{_no_minus_zero(100 * value, digits):.{digits}f}"


def signed(value: float, digits: int = 1) -> str:
    """A share as signed percent (points), with a typographic minus so that columns line up."""
    if math.isnan(value):
        return NONE
    value = _no_minus_zero(100 * value, digits)
    return f"{value:+.{digits}f}".replace("-", _MINUS) if value else f"{value:.{digits}f}"


def small_number(value: float | None) -> str:
    """A number that may span many orders of magnitude: 1.23, 0.045, 3.2e-5."""
    if value is None or math.isnan(value):
        return NONE
    if value == 0:
        return "0"
    if abs(value) >= 0.001:
        return f"{value:.2f}" if abs(value) >= 1 else f"{value:#.2g}"
    digits, power = f"{value:.1e}".split("e")
    return f"{digits}e{int(power)}"


def accuracy(found: Interval) -> Text:
    """A mean in percent with its interval."""
    return Text(percent(found.mean), f"[{percent(found.low)}, {percent(found.high)}]" if found.known else "")


def change(found: Interval | None, *, mark: bool = True) -> Text:
    """A difference with its interval; an arrow and a mark if the interval excludes 0."""
    if found is None or not found.n or math.isnan(found.mean):
        return Text(NONE, kind="muted")
    small = f"[{signed(found.low)}, {signed(found.high)}]" if found.known else ""
    if not mark or not found.excludes(0):
        return Text(signed(found.mean), small)
    up = found.mean > 0
    return Text(f"{'▲' if up else '▼'} {signed(found.mean)}", small, "better" if up else "worse")


def items(cell: Cell) -> Text:
    """The number of items; if some are missing, of how many, and the number that failed or do not apply."""
    if cell.complete:
        return Text(str(cell.n), f"{cell.skipped} do not apply" if cell.skipped else "")
    failed = f", {cell.failed} failed" if cell.failed else ""
    return Text(f"{cell.n} of {cell.planned}", failed.lstrip(", "), "worse")


def leaderboard(board: Board, summary: Summary) -> Table:
    """The leaderboard at one budget, best first; the full cache is the first row, without a rank."""
    rows = []
    groups = list(summary.groups)
    for row in board.rows:
        rank = Text(NONE if row.rank is None else str(row.rank))
        name = candidate_text(row.candidate)
        if row.candidate.method == FLOOR:
            name = Text(name.main, "floor", series=name.series)
        count = Text(str(row.n), "incomplete" if row.short or row.missing else "", "worse" if row.short else "")
        is_full = row.candidate.method == FULL
        rows.append((
            name, rank, Text(percent(row.score)),
            *(accuracy(row.groups[group]) if group in row.groups else Text(NONE, kind="muted") for group in groups),
            Text(NONE, "baseline", "muted") if is_full else change(row.change),
            Text(NONE, kind="muted") if row.floor is None else change(row.floor), count,
            Text(percent(row.stored)), Text(percent(row.total)), Text(number(row.time)),
        ))  # fmt: skip
    notes = []
    if not board.has_floor:
        notes.append("random was not run at this budget, so there is no floor here")
    for row in board.rows:
        if row.missing:
            notes.append(f"{row.candidate.label} has no rank: no result on {', '.join(row.missing)}")
        if row.short:
            notes.append(f"{row.candidate.label} has fewer items than planned on {', '.join(row.short)}")
    title = "Methods without a budget" if board.budget is None else f"Budget {budget_text(board.budget)}"
    return Table(
        title,
        (
            "method", "rank", "accuracy, %", *(f"{group}, %" for group in groups), "relative change against full, %",
            "above random, points", "items", "stored bytes, % of full", "total bytes, % of full",
            "time per token, full = 1",
        ),
        tuple(rows),
        tuple(notes),
    )  # fmt: skip


def task_states(summary: Summary) -> Table:
    """Every task: whether it ranks methods, and why not."""
    rows = []
    for state in summary.states.values():
        use = "ranks methods" if state.ranked else "not used to rank"
        rows.append((
            Text(state.name, state.title), accuracy(state.full), Text(str(state.full.n)),
            change(state.floor, mark=False),
            Text(use, kind="" if state.ranked else "worse"), Text("; ".join(state.reasons)),
        ))  # fmt: skip
    labels = {state.floor_label for state in summary.states.values() if state.floor_label}
    floor = f"{' / '.join(sorted(labels))} minus full, points" if labels else "random minus full, points"
    return Table(
        "Tasks",
        ("task", "full cache, accuracy %", "items", floor, "use", "why"),
        tuple(rows),
        words=frozenset({0, 4, 5}),
    )


def task_table(summary: Summary, task: str, budget: Budget | None) -> Table:
    """All figures of one task at one budget, best first; the full cache is the first row."""
    candidates = sorted(summary.at(budget), key=lambda c: _worst_last(summary.cells[task, c.label]))
    cells = [summary.cells[task, c.label] for c in ([summary.full] if summary.full else []) + candidates]
    likelihood = any(cell.log_likelihood is not None for cell in cells)
    known = {c.label: c for c in summary.candidates}
    rows = []
    for cell in cells:
        is_full = known[cell.label].method == FULL
        row = [
            candidate_text(known[cell.label]), items(cell), accuracy(cell.accuracy),
            Text(NONE, kind="muted") if is_full else change(cell.change),
            Text(percent(cell.match)), Text(small_number(cell.kl)), Text(f"{cell.scored:,}"),
            Text(percent(cell.stored)), Text(percent(cell.peak)), Text(percent(cell.host_share)),
            Text(percent(cell.total)), Text(number(cell.time)),
        ]  # fmt: skip
        rows.append(tuple([*row, Text(number(cell.log_likelihood, 3))] if likelihood else row))
    columns = [
        "method", "items", "accuracy, %", "change against full, points", "same leading tokens, %", "KL, nats per token",
        "scored tokens", "stored bytes, % of full", "peak bytes, % of full", "host bytes, % of full",
        "total bytes, % of full", "time per token, full = 1",
    ]  # fmt: skip
    title = f"{task}, {budget_text(budget)}" if budget else f"{task}, methods without a budget"
    return Table(title, tuple(columns + ["log-likelihood, nats per token"] * likelihood), tuple(rows))


def matrix(found: Differences, title: str, names: dict[str, str]) -> Table:
    """Pairwise differences, row minus column. Marked cells have an interval that excludes 0."""
    rows = []
    for i, label in enumerate(found.labels):
        cells = [Text("", kind="muted") if i == j else change(found.at(i, j)) for j in range(len(found.labels))]
        rows.append((Text(names[label], series=names[label]), *cells))
    counts = {pair.n for pair in found.pairs.values()}
    notes = []
    if len(counts) == 1:
        notes.append(f"{counts.pop()} common items for every pair")
    elif counts:
        notes.append(f"pairs have {min(counts)} to {max(counts)} common items")
    marked = sum(pair.excludes(0) for pair in found.pairs.values())
    notes.append(
        f"{marked} of {len(found.pairs)} pairs are marked; about {0.05 * len(found.pairs):.0f} would be marked by "
        "chance if all methods were equal"
    )
    return Table(title, ("row minus column, points", *(names[label] for label in found.labels)), tuple(rows),
                 tuple(notes), grid=True)  # fmt: skip


def at_equal_bytes(summary: Summary, kind: equal_bytes.Kind) -> Table | None:
    """Accuracy of every series at shares of a full cache's bytes, the best at a share marked; None without any."""
    found = equal_bytes.table(summary, kind)
    shares = sorted({share for row in found.values() for share in row})
    best = {share: max(row[share].accuracy.mean for row in found.values() if share in row) for share in shares}
    rows = []
    for series, row in sorted(found.items(), key=lambda pair: -fmean(one.accuracy.mean for one in pair[1].values())):
        cells = []
        for share in shares:
            if share not in row:
                cells.append(Text(NONE, kind="muted"))
                continue
            one = accuracy(row[share].accuracy)
            cells.append(replace(one, kind="better" if row[share].accuracy.mean >= best[share] - 1e-9 else ""))
        rows.append((Text(series, series=series), *cells))
    title = "Total bytes (device and host)" if kind == "total" else "Bytes on the compute device"
    columns = ("method", *(f"{percent(share, 0)}% of full" for share in shares))
    return Table(title, columns, tuple(rows)) if rows else None


def chunks(summary: Summary) -> Table | None:
    """What methods with a backing store retrieved, over all items of all tasks; None if none did."""
    rows = []
    for candidate in sorted(summary.candidates, key=lambda c: (c.series, c.place)):
        cells = [summary.cells[task, candidate.label] for task in summary.tasks]
        count = sum(cell.n for cell in cells)
        slots = sum(cell.n * (cell.retrieved or 0) for cell in cells)
        if not slots:
            continue
        hits = sum(cell.n * (cell.retrieved or 0) * (cell.hits or 0) for cell in cells)
        host = sum(cell.n * (cell.host or 0) for cell in cells)
        rows.append((
            Text(candidate.series, series=candidate.series), Text(budget_text(candidate.budget)), Text(str(count)),
            Text(f"{slots / count:,.0f}"), Text(percent(hits / slots)), Text(size_text(host / count)),
        ))  # fmt: skip
    columns = (
        "method", "budget", "items", "slots retrieved per item",
        "of these also retrieved by the previous step, %", "host bytes per item",
    )  # fmt: skip
    return Table("Chunks retrieved", columns, tuple(rows)) if rows else None


def leaderboard_json(summary: Summary) -> dict[str, Any]:
    """All leaderboards and cells as plain values for JSON; missing figures are null."""
    return {
        "plan": summary.plan.to_dict(),
        "ranking_tasks": summary.ranked,
        "groups": summary.groups,
        "equal_bytes": equal_bytes.plain(summary),
        "tasks": [
            {
                "task": state.name, "full": _interval(state.full), "random_less_full": _interval(state.floor),
                "random": state.floor_label, "ranked": state.ranked, "reasons": state.reasons,
            }
            for state in summary.states.values()
        ],
        "leaderboards": [
            {
                "budget": board.budget.text if board.budget else None,
                "rows": [
                    {
                        "rank": row.rank, "label": row.candidate.label, "method": row.candidate.method,
                        "accuracy": _plain(row.score), "relative_change": _interval(row.change),
                        "above_random": _interval(row.floor), "items": row.n, "stored_share": _plain(row.stored),
                        "total_share": _plain(row.total), "time_ratio": _plain(row.time),
                        "groups": {group: _interval(found) for group, found in row.groups.items()},
                        "missing": list(row.missing), "incomplete": list(row.short),
                    }
                    for row in board.rows
                ],
            }
            for board in summary.boards
        ],
        "cells": [_cell(cell) for cell in summary.cells.values()],
        "failures": [{"error": f.error, "cases": [list(case) for case in f.cases]} for f in summary.failures],
    }  # fmt: skip


def _cell(cell: Cell) -> dict[str, Any]:
    return {**{name: _json(value) for name, value in vars(cell).items()}, "host_share": _plain(cell.host_share)}


def _json(value: Any) -> Any:
    if isinstance(value, Interval):
        return _interval(value)
    return _plain(value) if isinstance(value, float) else value


def _interval(found: Interval | None) -> dict[str, Any] | None:
    if found is None:
        return None
    return {"mean": _plain(found.mean), "low": _plain(found.low), "high": _plain(found.high), "n": found.n}


def _plain(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else value


def _worst_last(cell: Cell) -> tuple[bool, float, str]:
    return cell.n == 0, -cell.accuracy.mean if cell.n else 0.0, cell.label


def _no_minus_zero(value: float, digits: int) -> float:
    return 0.0 if round(value, digits) == 0 else value

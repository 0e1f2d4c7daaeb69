"""Tables of the benchmarks with vLLM, as a head and lines."""

from __future__ import annotations

from typing import Any

Rows = list[dict[str, Any]]
Table = tuple[list[str], list[list[str]]]


def load(rows: Rows) -> Table:
    """Requests in a fixed pool."""
    head = [
        "side", "side by side", "preempted", "requests/s", "first token s", "ms per token", "whole request s",
        "over the same request without", "requests slower than without",
    ]  # fmt: skip
    lines = [
        [
            row["side"],
            f"{row['side_by_side']:g}",
            f"{row['preempted']:g}",
            _spread(row["requests_per_s"], 3),
            _spread(row["first_s"], 1),
            _spread(row["token_ms"], 0),
            _spread(row["whole_s"], 1),
            f"{row['whole_over_plain']['median']:.2f} (at most {row['whole_over_plain']['high']:.2f})",
            f"{row['slower']:.0%}",
        ]
        for row in rows
        if row["part"] == "load"
    ]
    return head, lines


def scoring(rows: Rows) -> Table:
    """The plugin's own work in a prefill."""
    head = ["side", "prefill s", "image encoder s", "scoring, of the prefill without the encoder", "moving slots"]
    lines = [
        [
            row["side"],
            _spread(row["prefill_s"], 2),
            _spread(row["encoder_s"], 2),
            f"{row['scoring_share']['median']:.1%}",
            f"{row['moving_share']['median']:.1%}",
        ]
        for row in rows
        if row["part"] == "scoring"
    ]
    return head, lines


def accuracy(rows: Rows) -> Table:
    """Scores of both engines by task, and over all tasks."""
    head = ["task", "visual tokens", "items", "vLLM", "transformers", "same tokens kept", "same answers", "stored"]
    sides = list(dict.fromkeys(row["side"] for row in rows))
    lines = [_answers(row["task"], row) for row in rows]
    fields = ("vllm", "transformers", "same_kept", "same_tokens", "stored")
    for side in sides:
        own = [row for row in rows if row["side"] == side]
        items = sum(row["items"] for row in own)
        mean = {name: sum(row[name] * row["items"] for row in own) / items for name in fields}
        lines.append(_answers("**all**", {"side": side, "items": items, **mean}))
    return head, lines


def _answers(task: str, row: dict[str, Any]) -> list[str]:
    shares = [f"{row[name]:.0%}" for name in ("vllm", "transformers", "same_kept", "same_tokens", "stored")]
    return [task, row["side"], str(row["items"]), *shares]


def _spread(value: dict[str, float], digits: int) -> str:
    return f"{value['median']:.{digits}f} ({value['q1']:.{digits}f}-{value['q3']:.{digits}f})"

"""Tables of the benchmarks with vLLM, as a head and lines."""

from __future__ import annotations

import statistics
from typing import Any

Rows = list[dict[str, Any]]
Table = tuple[list[str], list[list[str]]]


def load(rows: Rows) -> Table:
    """Requests in a fixed pool: medians over repeats of the medians over requests."""
    head = [
        "side", "side by side", "requests/s", "first token s", "ms per token", "whole request s",
        "over the same request without", "requests slower than without", "repeats",
    ]  # fmt: skip
    sides = dict.fromkeys(row["side"] for row in rows if row["part"] == "load")
    return head, [_side([row for row in rows if row["part"] == "load" and row["side"] == side]) for side in sides]


def _side(own: Rows) -> list[str]:
    def median(name: str) -> float:
        return statistics.median(row[name] if not isinstance(row[name], dict) else row[name]["median"] for row in own)

    ratios = [row["whole_over_plain"] for row in own]
    return [
        own[0]["side"],
        f"{median('side_by_side'):g}",
        f"{median('requests_per_s'):.3f}",
        f"{median('first_s'):.1f}",
        f"{median('token_ms'):.0f}",
        f"{median('whole_s'):.1f}",
        f"{median('whole_over_plain'):.2f} ({min(r['low'] for r in ratios):.2f}-{max(r['high'] for r in ratios):.2f})",
        f"{statistics.fmean(row['slower'] for row in own):.0%}",
        str(len(own)),
    ]


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

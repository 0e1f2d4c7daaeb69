"""The table of `benchmarks/serving.py` in docs/performance.md."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

PLAIN = ("one at a time", "full")
HEAD = ("side", "requests", "side by side", "tokens/s", "x alone", "first token, s", "95%", "per token, ms", "95%")


def table_of(rows: list[dict[str, Any]]) -> str:
    """One table for each length of the answers."""
    parts = []
    for context, tokens in dict.fromkeys((row["context"], row["tokens"]) for row in rows):
        own = [row for row in rows if (row["context"], row["tokens"]) == (context, tokens)]
        alone = next((row["tokens_per_second"] for row in own if row["method"] == "one at a time"), None)
        lines = ["| " + " | ".join(HEAD) + " |", "|" + "---|" * len(HEAD)]
        for row in own:
            first, token, speed = row["first_ms"], row["token_ms"], row["tokens_per_second"]
            cells = [
                row["method"], str(row["requests"]), str(row["side_by_side"]), f"{speed:.1f}",
                "" if alone is None else f"{speed / alone:.2f}", f"{first['median'] / 1e3:.1f}",
                f"{first['p95'] / 1e3:.1f}", f"{token['median']:.0f}", f"{token['p95']:.0f}",
            ]  # fmt: skip
            lines.append("| " + " | ".join(cells) + " |")
        mib = own[0]["pool_bytes"] / 2**20
        parts.append(f"Prompts of {context:,} tokens, answers of {tokens}, {mib:.0f} MiB of KV:\n\n" + "\n".join(lines))
    return "\n\n".join(parts)


def lowest(field: str, tokens: int, against: str) -> Callable[[list[dict[str, Any]]], tuple[float, str] | None]:
    """The lowest ratio of a compressed side's field to that of the side `against`, and the method that has it."""

    def find(rows: list[dict[str, Any]]) -> tuple[float, str] | None:
        own = {row["method"]: row[field] for row in rows if row.get("tokens") == tokens and field in row}
        base = own.get(against)
        found = [(value / base, f"lowest: {name}") for name, value in own.items() if name not in PLAIN] if base else []
        return min(found) if found else None

    return find

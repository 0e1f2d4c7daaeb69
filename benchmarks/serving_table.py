"""The table of `benchmarks/serving.py` in docs/performance.md."""

from __future__ import annotations

from typing import Any

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

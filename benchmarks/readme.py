"""The README's measured figures, written from the committed result files and from nothing else."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.common import RESULTS

BUDGET = 0.1  # of the decode table
README = Path(__file__).parent.parent / "README.md"
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"


def block() -> str:
    """Markdown between the markers: one table per result file, each under the command that made it."""
    parts = []
    machines: dict[str, None] = {}
    for name, build in (("memory", _memory), ("prefill", _prefill), ("decode_attention", _decode_attention)):
        path = RESULTS / f"{name}.json"
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf8")) if path.exists() else {}
        if content.get("complete") and not content["quick"]:
            parts.append(f"`{content['command']}`\n\n{build(content['rows'])}")
            machine = content["machine"]
            versions = machine["versions"]
            machines[
                f"{machine['cpu']}, {machine['threads']} threads, torch {versions['torch']}, transformers "
                f"{versions['transformers']}"
            ] = None
    if parts:
        parts.append(
            f"{'; '.join(machines)}; medians, which hide HAE's evictions (one in 64 steps). All figures, by means too, "
            "with plots and with what was aimed for: [docs/performance.md](docs/performance.md)."
        )
    return "\n\n".join(parts)


def update() -> None:
    """Replaces what stands between the README's markers."""
    text = README.read_text()
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    README.write_text(f"{before}{BEGIN}\n{block()}\n{END}{after}")


def _memory(rows: list[dict[str, Any]]) -> str:
    budgets = sorted({row["budget"] for row in rows})
    head = [
        "method",
        *[f"full / stored at {budget:.0%}" for budget in budgets],
        "on the host",
        "peak / (layer + stored)",
    ]
    lines = []
    for name in dict.fromkeys(row["method"] for row in rows):
        own = {row["budget"]: row for row in rows if row["method"] == name}
        first = own[budgets[0]]
        ratios = [f"{own[budget]['full_over_stored']:.1f}" for budget in budgets]
        host = f"{first['host_bytes'] / first['full_bytes']:.0%} of full" if first["host_bytes"] else ""
        lines.append([f"{name}", *ratios, host, f"{first['peak_over_layer_plus_stored']:.2f}"])
    shape = rows[0]
    intro = (
        f"Storage bytes, {shape['geometry']} geometry, {shape['context']:,} tokens, {shape['layers']} layers; slack, "
        "positions, side tensors and digests count as stored:"
    )
    return f"{intro}\n\n{_table(head, lines)}"


def _prefill(rows: list[dict[str, Any]]) -> str:
    own = [row for row in rows if row["part"] == "overhead" and row["method"] != "plain"]
    contexts = sorted({row["context"] for row in own})
    head = ["method", *[f"own work at {context:,}" for context in contexts]]
    lines = []
    for name in dict.fromkeys(row["method"] for row in own):
        found = {row["context"]: row["own_share"] for row in own if row["method"] == name}
        lines.append([name, *[f"{found[context]:.1%}" if context in found else "" for context in contexts]])
    intro = (
        f"Prefill of {own[0]['layers']} layers of a text decoder (random weights), three quarters of it visual: "
        "the library's time after each layer's attention as a share of a plain prefill."
    )
    dropped = [row for row in rows if row["part"] == "drop" and "faster_than_plain" in row]
    after = "".join(
        f"\n\nHAE with `drop_hidden_states`, three quarters of the pictures dropped, reads {row['context']:,} tokens "
        f"{row['faster_than_plain']:.2f} times as fast as the plain model ({row['layers']} layers)."
        for row in dropped[-1:]
    )
    return f"{intro}\n\n{_table(head, lines)}{after}"


def _decode_attention(rows: list[dict[str, Any]]) -> str:
    rows = [row for row in rows if row["budget"] == BUDGET]
    contexts = sorted({row["context"] for row in rows})
    head = ["attention + cache update, per layer and token"]
    for context in contexts:
        head += [f"ms at {context:,}", "x default", "x packed"]
    lines = []
    for name in dict.fromkeys(row["method"] for row in rows):
        line = [name]
        for context in contexts:
            row = next(r for r in rows if r["method"] == name and r["context"] == context)
            line += [
                f"{row['ms']['median']:.2f}",
                f"{row['faster_than_default']:.1f}",
                f"{row['faster_than_packed']:.1f}",
            ]
        lines.append(line)
    intro = (
        f"Decode at a budget of {BUDGET:.0%}, {rows[0]['geometry']} geometry, against transformers' default path and a "
        "preallocated full cache with packed query groups (how many times faster):"
    )
    return f"{intro}\n\n{_table(head, lines)}"


def _table(head: list[str], lines: Iterable[list[str]]) -> str:
    rule = ["---"] + ["---:"] * (len(head) - 1)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [head, rule, *lines])

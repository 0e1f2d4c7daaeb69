"""The README's measured figures, written from the committed result files and from nothing else."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.common import RESULTS

README = Path(__file__).parent.parent / "README.md"
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"


def block() -> str:
    """Markdown between the markers: one table per result file, each under the command that made it."""
    parts = []
    for name, build in (("memory", _memory), ("prefill", _prefill), ("decode", _decode)):
        path = RESULTS / f"{name}.json"
        if path.exists():
            content = json.loads(path.read_text())
            parts.append(f"`{content['command']}`\n\n{build(content['rows'])}")
    if parts:
        machine = content["machine"]
        parts.append(
            f"{machine['processor']}, {machine['threads']} threads, torch {machine['torch']}, transformers "
            f"{machine['transformers']}; medians. Raw figures with ranges: `benchmarks/results/`."
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
    contexts = sorted({row["context"] for row in rows})
    head = ["method"]
    for context in contexts:
        head += [f"time / plain at {context:,}", "own work"]
    lines = []
    for name in dict.fromkeys(row["method"] for row in rows):
        line = [name]
        for context in contexts:
            found = [row for row in rows if row["method"] == name and row["context"] == context]
            line += [f"{found[0]['wall_over_plain']:.2f}", f"{found[0]['own_work_share']:.1%}"] if found else ["", ""]
        lines.append(line)
    intro = (
        "Prefill of a two-layer slice of Qwen2.5-VL-7B's decoder (random weights, fp32), three quarters of the prompt "
        "visual. `own work` is the library's time after each layer's attention as a share of the plain prefill:"
    )
    return f"{intro}\n\n{_table(head, lines)}"


def _decode(rows: list[dict[str, Any]]) -> str:
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
        f"Decode at a budget of {rows[0]['budget']:.0%}, {rows[0]['geometry']} geometry, against transformers' default "
        "path and a preallocated full cache with packed query groups (how many times faster):"
    )
    return f"{intro}\n\n{_table(head, lines)}"


def _table(head: list[str], lines: Iterable[list[str]]) -> str:
    rule = ["---"] + ["---:"] * (len(head) - 1)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [head, rule, *lines])

"""Write the README's measured figures from the committed result files."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.common import RESULTS

BUDGET = 0.1  # of the speed table
METHODS = ("full", "hae", "hybridkv", "snapkv", "adakv", "h2o")
README = Path(__file__).parent.parent / "README.md"
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
Rows = list[dict[str, Any]]


def block() -> str:
    """The Markdown between the markers: a table of memory and one of speed, each with the commands that measured it.

    A benchmark without a complete result file is left out.
    """
    found = {
        name: content for name in ("memory", "decode_attention", "generate", "prefill") if (content := _read(name))
    }
    parts = []
    if "memory" in found:
        parts.append(f"**Does memory fall?** {_memory(found['memory']['rows'])}\n\n`{found['memory']['command']}`")
    speed: list[list[str]] = []
    if "decode_attention" in found:
        speed += _attention(found["decode_attention"]["rows"])
    if "generate" in found:
        speed += _models(found["generate"]["rows"], found["generate"]["settings"]["layers"])
    if "prefill" in found:
        speed += _prefill(found["prefill"]["rows"])
    if speed:
        head = [f"budget {BUDGET:.0%}", *METHODS]
        commands = ", ".join(f"`{found[name]['command']}`" for name in found if name != "memory")
        parts.append(
            "**Is decoding faster?** Times faster than a full cache: the attention step against a preallocated full "
            "cache with packed query groups, whole models against the fastest full cache. Last rows: the method's own "
            "work, as a share of a plain prefill.\n\n"
            f"{_table(head, speed)}\n\n{commands}"
        )
    if parts:
        machines = dict.fromkeys(_machine(content["machine"]) for content in found.values())
        parts.append(
            f"{'; '.join(machines)}; medians, which leave out HAE's evictions (one in 64 steps). All figures: "
            "[performance](docs/performance.md)."
        )
    return "\n\n".join(parts)


def update() -> None:
    """Replace the text between the README's markers."""
    text = README.read_text(encoding="utf8")
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    README.write_text(f"{before}{BEGIN}\n{block()}\n{END}{after}", encoding="utf8")


def _read(name: str) -> dict[str, Any] | None:
    """A result file; None if it is missing, unfinished or of a `--quick` run."""
    path = RESULTS / f"{name}.json"
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf8")) if path.exists() else {}
    return content if content.get("complete") and not content["quick"] else None


def _machine(machine: dict[str, Any]) -> str:
    versions = machine["versions"]
    return (
        f"{machine['cpu']}, {machine['threads']} threads, torch {versions['torch']}, "
        f"transformers {versions['transformers']}"
    )


def _memory(rows: Rows) -> str:
    shape = rows[0]
    intro = (
        f"Bytes of a full cache / stored bytes; {shape['geometry']} geometry, {shape['context']:,} tokens; positions, "
        "side tensors and digests count as stored."
    )
    lines = []
    for budget in sorted({row["budget"] for row in rows}):
        own = {row["method"]: row for row in rows if row["budget"] == budget}
        lines.append([f"{budget:.0%}", *[_times(own.get(name), "full_over_stored") for name in METHODS]])
    hosts = [row for row in rows if row["host_bytes"] and row["budget"] == BUDGET]
    after = "".join(
        f"\n\n{row['method']} also holds {row['host_bytes'] / row['full_bytes']:.0%} of the full cache in host memory; "
        f"its peak during prefill is {row['peak_over_layer_plus_stored']:.2f} times one full layer plus what is stored."
        for row in hosts
    )
    return f"{intro}\n\n{_table(['budget', *METHODS], lines)}{after}"


def _attention(rows: Rows) -> list[list[str]]:
    lines = []
    rows = [row for row in rows if row["budget"] == BUDGET]
    for context in sorted({row["context"] for row in rows}):
        own = {row["method"]: row for row in rows if row["context"] == context}
        cells = [_times(own.get(name), "faster_than_packed") for name in METHODS]
        lines.append([f"attention step, {context:,} tokens", *cells])
    return lines


def _models(rows: Rows, layers: int) -> list[list[str]]:
    lines = []
    rows = [row for row in rows if row["budget"] == BUDGET and row["batch"] == 1]
    for model, asked in dict.fromkeys((row["model"], row["asked"]) for row in rows):
        own = {row["method"]: row for row in rows if (row["model"], row["asked"]) == (model, asked)}
        cells = [_times(own.get(name), "faster_than_best_full") for name in METHODS]
        name = model if model == "demo" else f"{layers} layers of {model}"
        lines.append([f"time per token, {name}, {asked:,} tokens", *cells])
    return lines


def _prefill(rows: Rows) -> list[list[str]]:
    lines = []
    rows = [row for row in rows if row["part"] == "overhead"]
    for context in sorted({row["context"] for row in rows}):
        own = {row["method"]: row for row in rows if row["context"] == context}
        cells = [f"+{own[name]['own_share']:.1%}" if name in own else "" for name in METHODS]
        lines.append([f"added to a prefill of {context:,} tokens", *cells])
    return lines


def _times(row: dict[str, Any] | None, field: str) -> str:
    return f"{row[field]:.1f}x" if row is not None else ""


def _table(head: list[str], lines: Iterable[list[str]]) -> str:
    rule = ["---"] + ["---:"] * (len(head) - 1)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [head, rule, *lines])

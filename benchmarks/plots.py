"""The plots of the performance page. Colours are distinguishable for colour-blind readers, and markers differ too."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.ticker import FuncFormatter

Rows = list[dict[str, Any]]
# Okabe and Ito's palette.
COLOURS = ("#000000", "#E69F00", "#56B4E9", "#009E73", "#0072B2", "#D55E00", "#CC79A7", "#999999")
MARKERS = "osD^vP*X"
SIDES = ("transformers default", "packed SDPA", "full", "hae", "hybridkv", "snapkv", "adakv", "h2o")
Plots = list[tuple[str, str]]
CAPTIONS = {
    "decode_attention": "Time per layer and token over context, and speed-up over budget",
    "generate": "Time per output token of whole models",
    "prefill": "Own work in a prefill",
    "memory": "Full bytes over stored bytes",
    "append": "Time per appended token",
    "kvpress": "Time per token and stored bytes compared with kvpress",
    "scale": "Time per step over context and over batch",
}


def draw(contents: list[dict[str, Any]], folder: Path) -> dict[str, Plots]:
    """Draw SVG files; return benchmark -> (path relative to the page, caption)."""
    # Text stays text and ids are fixed, so that redrawing the same figures gives the same file.
    with plt.rc_context({"svg.fonttype": "none", "svg.hashsalt": "foveakv", "font.size": 9, "axes.axisbelow": True}):
        for content, path, _ in _each(contents, folder.name):
            figure = _DRAWN[content["benchmark"]](content["rows"])
            if content["quick"]:
                figure.suptitle("quick run, not a measurement")
            figure.savefig(folder.parent / path, bbox_inches="tight", metadata={"Date": None})
            plt.close(figure)
    return captions(contents, folder.name)


def captions(contents: list[dict[str, Any]], folder: str) -> dict[str, Plots]:
    """What `draw` returns, without drawing."""
    found: dict[str, Plots] = {}
    for content, path, caption in _each(contents, folder):
        found.setdefault(content["benchmark"], []).append((path, caption))
    return found


def _each(contents: list[dict[str, Any]], folder: str) -> Iterator[tuple[dict[str, Any], str, str]]:
    """Every result that has a plot, with the plot's path and caption; a second file of a benchmark gets a number."""
    count: Counter[str] = Counter()
    for content in contents:
        name = content["benchmark"]
        if name in _DRAWN and content["rows"]:
            count[name] += 1
            stem = name if count[name] == 1 else f"{name}-{count[name]}"
            yield content, f"{folder}/{stem}.svg", f"{CAPTIONS[name]}, {content['settings']['dtype']}"


def _style(name: str) -> dict[str, Any]:
    base = name if name in SIDES else name.split(" ")[0]
    place = SIDES.index(base) if base in SIDES else len(SIDES) - 1
    return {"color": COLOURS[place], "marker": MARKERS[place], "markersize": 5, "linewidth": 1.4}


def _tokens(value: float, _: Any = None) -> str:
    return f"{value / 1024:g}k" if value >= 1024 else f"{value:g}"


def _context_axis(axis: Any, contexts: list[int]) -> None:
    axis.set_xscale("log", base=2)
    axis.set_xticks(sorted(contexts))
    axis.xaxis.set_major_formatter(FuncFormatter(_tokens))
    axis.set_xlabel("context (tokens)")
    axis.grid(True, alpha=0.3)


def _nearest(values: list[Any], wanted: float) -> Any:
    return min(values, key=lambda value: abs(value - wanted))


def _decode_attention(rows: Rows) -> Any:
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), constrained_layout=True)
    budget = _nearest([row["budget"] for row in rows], 0.1)
    contexts = sorted({row["context"] for row in rows})
    names = list(dict.fromkeys(row["method"] for row in rows))
    for name in names:
        own = sorted((r for r in rows if r["method"] == name and r["budget"] == budget), key=lambda r: r["context"])
        median = [r["ms"]["median"] for r in own]
        around = [[r["ms"]["median"] - r["ms"]["q1"] for r in own], [r["ms"]["q3"] - r["ms"]["median"] for r in own]]
        left.errorbar([r["context"] for r in own], median, yerr=around, label=name, **_style(name))
    _context_axis(left, contexts)
    left.set_yscale("log")
    left.set_ylabel("time per layer and token (ms)")
    left.set_title(f"budget {budget:.0%}")
    left.legend(fontsize=7)
    context = _nearest(contexts, 32768)
    for name in names:
        if name in ("transformers default", "packed SDPA", "full"):
            continue
        own = sorted((r for r in rows if r["method"] == name and r["context"] == context), key=lambda r: r["budget"])
        right.plot([100 * r["budget"] for r in own], [r["faster_than_packed"] for r in own], label=name, **_style(name))
    right.axhline(1, color="#999999", linewidth=1)
    right.set_xlabel("budget (% of the prompt)")
    right.set_ylabel("times faster than packed SDPA")
    right.set_title(f"{_tokens(context)} tokens")
    right.grid(True, alpha=0.3)
    return figure


def _bars(axis: Any, names: list[str], values: list[float], spreads: list[dict[str, float]] | None = None) -> None:
    around = None
    if spreads is not None:
        around = [[s["median"] - s["q1"] for s in spreads], [s["q3"] - s["median"] for s in spreads]]
    colours = [_style(name.split(" (")[0])["color"] for name in names]
    axis.barh(range(len(names)), values, color=colours, xerr=around, error_kw={"ecolor": "#999999"})
    axis.set_yticks(range(len(names)), names)
    axis.set_ylim(len(names) - 0.5, -0.5)
    axis.grid(True, axis="x", alpha=0.3)


def _generate(rows: Rows) -> Any:
    cases = list(dict.fromkeys((row["model"], row["context"], row["batch"]) for row in rows))
    figure, axes = plt.subplots(
        1, len(cases), figsize=(3.4 * len(cases), 2.8), constrained_layout=True, squeeze=False, sharey=True
    )
    for axis, (model, context, batch) in zip(axes[0], cases, strict=True):
        own = [r for r in rows if (r["model"], r["context"], r["batch"]) == (model, context, batch)]
        spreads = [r["token_ms"] for r in own]
        _bars(axis, [r["method"] for r in own], [s["median"] for s in spreads], spreads)
        axis.set_xlabel("time per token (ms)")
        axis.set_title(f"{model}, {context:,} tokens" + (f", batch {batch}" if batch > 1 else ""))
    return figure


def _prefill(rows: Rows) -> Any:
    own = [row for row in rows if row["part"] == "overhead" and row["method"] != "plain"]
    contexts = list(dict.fromkeys(row["context"] for row in own))
    figure, axes = plt.subplots(
        1, max(1, len(contexts)), figsize=(4 * max(1, len(contexts)), 2.4), constrained_layout=True, squeeze=False
    )
    for axis, context in zip(axes[0], contexts, strict=False):
        found = [row for row in own if row["context"] == context]
        _bars(axis, [row["method"] for row in found], [100 * row["own_share"] for row in found])
        axis.axvline(5 if context < 8192 else 3, color="#999999", linestyle="--")
        axis.set_xlabel("own work (% of a plain prefill); dashed: aim")
        axis.set_title(f"{context:,} tokens")
    return figure


def _memory(rows: Rows) -> Any:
    budgets = sorted({row["budget"] for row in rows})
    figure, axes = plt.subplots(
        1, len(budgets), figsize=(4 * len(budgets), 3), constrained_layout=True, squeeze=False, sharey=True
    )
    for axis, budget in zip(axes[0], budgets, strict=True):
        own = [row for row in rows if row["budget"] == budget]
        _bars(axis, [row["method"] for row in own], [row["full_over_stored"] for row in own])
        axis.set_xlabel("full bytes / stored bytes")
        axis.set_title(f"budget {budget:.0%}")
    return figure


def _append(rows: Rows) -> Any:
    figure, axis = plt.subplots(figsize=(5, 2), constrained_layout=True)
    context = max(row["context"] for row in rows)
    own = [row for row in rows if row["context"] == context]
    _bars(axis, [row["method"] for row in own], [row["total_ms"] / row["tokens"] for row in own])
    axis.set_xscale("log")
    axis.set_xlabel("time per append (ms, mean)")
    axis.set_title(f"{context:,} tokens")
    return figure


def _kvpress(rows: Rows) -> Any:
    context = max(row["context"] for row in rows)
    own = [row for row in rows if row["context"] == context]
    figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3), constrained_layout=True, sharey=True)
    names = [f"{row['method']} ({row['side']})" for row in own]
    spreads = [row["token_ms"] for row in own]
    _bars(left, names, [s["median"] for s in spreads], spreads)
    left.set_xlabel("time per token (ms)")
    _bars(right, names, [row["stored_bytes"] / 1e6 for row in own])
    right.set_xlabel("stored (MB)")
    figure.suptitle(f"{context:,} tokens, budget {own[0]['budget']:.0%}")
    return figure


def _scale(rows: Rows) -> Any:
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), constrained_layout=True)
    for axis, over in ((left, "context"), (right, "batch")):
        own = [row for row in rows if row["axis"] == over]
        for name in dict.fromkeys(row["method"] for row in own):
            found = sorted((row for row in own if row["method"] == name), key=lambda row: row[over])
            dashed = "--" if name.endswith("tokens") else "-"
            axis.plot(
                [row[over] for row in found],
                [row["ms"]["median"] for row in found],
                label=name,
                linestyle=dashed,
                **_style(name),
            )
        axis.set_yscale("log")
        axis.set_ylabel("time per layer and step (ms)")
    _context_axis(left, [row["context"] for row in rows if row["axis"] == "context"])
    right.set_xscale("log", base=2)
    right.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    right.set_xlabel("batch (sequences)")
    right.grid(True, alpha=0.3)
    left.legend(fontsize=6)
    return figure


_DRAWN: dict[str, Callable[[Rows], Any]] = {
    "decode_attention": _decode_attention,
    "generate": _generate,
    "prefill": _prefill,
    "memory": _memory,
    "append": _append,
    "kvpress": _kvpress,
    "scale": _scale,
}

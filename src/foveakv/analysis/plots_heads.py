"""Plots of head scores and types, and of what heads attend to."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch

from foveakv.analysis.focus import SHARES, Focus
from foveakv.analysis.heads import PromptHeads, correlation
from foveakv.analysis.plot_style import COLOURS, DASHES, MARKERS, finish, short
from foveakv.analysis.viz import _PLAIN, _figure
from foveakv.util.files import save_figure

_MOST_NUMBERS = 10  # with more prompts, the cells of a matrix have no numbers
_CLASSES = (("static", True, 1), ("dynamic", False, 2))  # name, type, colour


def draw_heads(path: str | Path, result: Focus) -> None:
    """Writes a PNG: maps of S and of types, sorted S, attention curves, agreement of prompts, and focus counts."""
    maps = result.maps
    heads = maps.scores.shape[2]
    tall = min(max(0.28 * heads, 1.1), 4.0)
    several = len(maps.labels) > 1
    panels = [_sorted_scores, _curves, *([_agreement] if several else [])]
    panels += [_counts, _count_scatter, _coverage_scatter] if result.counts else []
    panels += [_sweep] if result.points else []
    lines = (len(panels) + 1) // 2
    each = max(3.0, 0.42 * len(maps.labels) + 1.4) if several else 3.0
    figure = _figure(11, 2 * (tall + 0.75) + lines * each)
    above, below = cast(Any, figure).subfigures(2, 1, height_ratios=[2 * (tall + 0.75), lines * each])
    top, middle = above.subplots(2, 1)
    mean = "mean of the prompts" if several else maps.labels[0]
    _map(above, top, maps, maps.scores.mean(0), "cividis", None, f"top-k attention sum S ({mean})", "S")
    title = "head types: share of prompts for which a head is static" if several else "head types: 1 static, 0 dynamic"
    _map(above, middle, maps, maps.static_frequency, "Greys", (0, 1), title, "static")
    axes = below.subplots(lines, 2, squeeze=False).flatten()
    for ax, panel in zip(axes, panels, strict=False):
        panel(below, ax, result)
    for ax in axes[len(panels) :]:
        ax.set_axis_off()
    save_figure(figure, path)


def _sorted_scores(figure: Any, ax: Any, result: Focus) -> None:
    maps = result.maps
    for i, (label, scores) in enumerate(zip(maps.labels, maps.scores, strict=True)):
        ordered = scores.flatten().sort(descending=True).values
        share = 100 * torch.arange(1, len(ordered) + 1) / len(ordered)
        ax.plot(share, ordered, color=COLOURS[i % 7], linestyle=DASHES[i % 4], linewidth=1.4, label=short(label))
    theta = maps.settings.get("theta")
    if maps.settings.get("theta_quantile") is None and maps.settings.get("classify") == "auto" and _number(theta):
        ax.axhline(theta, color="#888888", linewidth=1, label="theta: static from here")
    ax.set_xlabel("heads by decreasing S (%)", fontsize=9)
    ax.set_ylabel("S", fontsize=9)
    ax.set_title("S of all heads, sorted", fontsize=10, loc="left")
    finish(ax)
    ax.legend(fontsize=7, loc="lower left", frameon=False)


def _number(value: Any) -> bool:
    return isinstance(value, (int, float))


def _curves(figure: Any, ax: Any, result: Focus) -> None:
    """Draws the attention in the top x % of the keys, mean and range of every type of heads (HybridKV, Fig. 3)."""
    shares = [100 * share for share in SHARES]
    for name, static, colour in _CLASSES:
        chosen = 100 * result.curves[result.maps.static == static]
        if len(chosen):
            ax.plot(shares, chosen.mean(0), color=COLOURS[colour], linestyle=DASHES[colour - 1], label=f"{name} heads")
            ax.fill_between(shares, chosen.amin(0), chosen.amax(0), color=COLOURS[colour], alpha=0.18, linewidth=0)
    ax.set_xlabel("keys with the highest attention (%)", fontsize=9)
    ax.set_ylabel("attention of text rows (%)", fontsize=9)
    ax.set_title("cumulative attention: mean, lowest to highest head", fontsize=10, loc="left")
    finish(ax)
    ax.legend(fontsize=8, loc="lower right", frameon=False)


def _counts(figure: Any, ax: Any, result: Focus) -> None:
    """Draws the cumulative focus count of every head over decode steps (HybridKV, Fig. 2), of the first prompt."""
    counts, k, static = result.counts[0].double() / result.k[0], result.k[0], result.maps.static[0]
    for name, kind, colour in _CLASSES:
        lines = counts[:, static == kind]
        steps = range(1, len(lines) + 1)
        for i in range(lines.shape[1]):
            ax.plot(steps, lines[:, i], color=COLOURS[colour], linewidth=0.5, alpha=0.45)
        if lines.shape[1]:
            ax.plot(steps, lines.mean(1), color=COLOURS[colour], linewidth=2.2, label=f"{name} heads, mean")
    ax.set_xlabel("decode step", fontsize=9)
    ax.set_ylabel(f"distinct tokens in focus / k (k = {k})", fontsize=9)
    ax.set_title(f"cumulative focus count ({short(result.maps.labels[0])})", fontsize=10, loc="left", **_PLAIN)
    finish(ax)
    ax.legend(fontsize=8, loc="upper left", frameon=False)


def _sweep(figure: Any, ax: Any, result: Focus) -> None:
    """Draws the static heads and the budget of static heads over theta."""
    points = [point for point in result.points if point.theta is not None]
    thetas = [point.theta for point in points]
    for i, (key, label) in enumerate((("static_share", "heads"), ("static_slots", "budget"))):
        values = [100 * getattr(point, key) for point in points]
        style = {"color": COLOURS[i + 1], "linestyle": DASHES[i], "marker": MARKERS[i + 1], "markersize": 3.5}
        ax.plot(thetas, values, label=f"static heads' share of {label}", **style)
    ax.set_xlabel("theta", fontsize=9)
    ax.set_ylabel("%", fontsize=9)
    ax.set_ylim(-2, 104)
    ax.set_title(f"types and budgets over theta (rho = {points[0].rho:g})", fontsize=10, loc="left")
    finish(ax)
    ax.legend(fontsize=8, loc="lower left", frameon=False)


def _count_scatter(figure: Any, ax: Any, result: Focus) -> None:
    _scatter(ax, result, result.final, "focus count / k, last step", result.correlation)


def _coverage_scatter(figure: Any, ax: Any, result: Focus) -> None:
    label = "attention on the text's top k (%)"
    _scatter(ax, result, 100 * result.coverage, label, result.covered_correlation)


def _scatter(ax: Any, result: Focus, values: Any, label: str, found: Any) -> None:
    """Draws values [P, L, H] over S, both as means over prompts."""
    scores, means, often = result.maps.scores.mean(0), values.mean(0), result.maps.static_frequency
    for name, chosen, colour in (("static", often >= 0.5, 1), ("dynamic", often < 0.5, 2)):
        marker = {"s": 14, "marker": MARKERS[colour], "color": COLOURS[colour], "label": f"{name} heads"}
        ax.scatter(scores[chosen], means[chosen], **marker)
    ax.set_xlabel("S, from the prompt", fontsize=9)
    ax.set_ylabel(label, fontsize=9)
    ax.set_title(
        f"does S predict it? rank correlation {found.mean:.2f} ({found.low:.2f} to {found.high:.2f})",
        fontsize=10, loc="left",
    )  # fmt: skip
    finish(ax)
    ax.legend(fontsize=8, frameon=False)


def _map(
    figure: Any,
    ax: Any,
    maps: PromptHeads,
    values: Any,
    colours: str,
    limits: tuple[float, float] | None,
    title: str,
    unit: str,
) -> None:
    """Draws values [L, H] as a map, with layers along x and heads along y."""
    heads = values.shape[1]
    low, high = limits or (float(values.min()), float(values.max()))
    mesh = ax.pcolormesh(values.T.numpy(), cmap=colours, vmin=low, vmax=high, edgecolors="#BBBBBB", linewidth=0.3)
    _ticks(ax.xaxis, maps.layers)
    _ticks(ax.yaxis, range(heads))
    ax.invert_yaxis()
    ax.set_xlabel("layer", fontsize=9)
    ax.set_ylabel("KV head", fontsize=9)
    ax.set_title(title, fontsize=10, loc="left", **_PLAIN)
    ax.tick_params(labelsize=8)
    bar = figure.colorbar(mesh, ax=ax, pad=0.01, fraction=0.03)
    bar.set_label(unit, fontsize=8)
    bar.ax.tick_params(labelsize=8)


def _ticks(axis: Any, names: Sequence[int]) -> None:
    """Labels at the centres of cells, as many as fit."""
    every = max(1, len(names) // 16)
    shown = range(0, len(names), every)
    axis.set_ticks([i + 0.5 for i in shown], labels=[str(names[i]) for i in shown])


def _agreement(figure: Any, ax: Any, result: Focus) -> None:
    """Draws a matrix of correlations; each cell also has the share of heads that change type."""
    maps, count = result.maps, len(result.maps.labels)
    values = torch.ones(count, count, dtype=torch.float64)
    for a in range(count):
        for b in range(count):
            found = correlation(maps.scores[a], maps.scores[b])
            values[a, b] = torch.nan if found is None else found
            changed = float((maps.static[a] != maps.static[b]).double().mean())
            if count <= _MOST_NUMBERS and a != b:
                text = f"{values[a, b]:.2f}\n{changed:.0%}"
                ax.text(b, a, text, ha="center", va="center", fontsize=7, color=_on(values[a, b]))
    low = min(0.0, float(values.nan_to_num(0).min()))
    mesh = ax.imshow(values.numpy(), cmap="cividis", vmin=low, vmax=1)
    labels = [short(label) for label in maps.labels]
    ax.set_xticks(range(count), labels=labels, rotation=40, ha="right", rotation_mode="anchor", fontsize=8, **_PLAIN)
    ax.set_yticks(range(count), labels=labels, fontsize=8, **_PLAIN)
    ax.set_title("correlation of S between prompts;\nbelow it: heads that change type", fontsize=10, loc="left")
    bar = figure.colorbar(mesh, ax=ax, fraction=0.05)
    bar.ax.tick_params(labelsize=8)


def _on(value: Any) -> str:
    """A text colour that is readable on cividis."""
    return "black" if float(value) > 0.55 else "white"

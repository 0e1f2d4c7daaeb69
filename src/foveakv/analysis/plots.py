"""Plots of the analyses, one figure each. Colours differ in lightness, and lines also in dash and marker."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch

from foveakv.analysis.eviction import GREEDY, Eviction
from foveakv.analysis.heads import PromptHeads, correlation
from foveakv.analysis.sparsity import PAPER_OVERLAP, THRESHOLD, Sparsity
from foveakv.analysis.viz import _PLAIN, _figure
from foveakv.util.files import save_figure

_COLOURS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_DASHES = ("-", "--", "-.", ":")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_MOST_NUMBERS = 10  # with more prompts, the cells of a matrix have no numbers


def draw_heads(path: str | Path, maps: PromptHeads) -> None:
    """Writes a PNG: maps of S and of head types over layers and heads, sorted S, and the agreement of prompts."""
    import numpy as np

    several = len(maps.labels) > 1
    heads = maps.scores.shape[2]
    tall = min(max(0.28 * heads, 1.1), 4.0)
    bottom = max(3.0, 0.42 * len(maps.labels) + 1.4) if several else 3.0
    figure = _figure(11, 2 * (tall + 0.75) + bottom)
    above, below = cast(Any, figure).subfigures(2, 1, height_ratios=[2 * (tall + 0.75), bottom])
    top, middle = above.subplots(2, 1)
    mean = "mean of the prompts" if several else maps.labels[0]
    _map(above, top, maps, maps.scores.mean(0), "cividis", None, f"top-k attention sum S ({mean})", "S")
    title = "head types: share of prompts for which a head is static" if several else "head types: 1 static, 0 dynamic"
    _map(above, middle, maps, maps.static_frequency, "Greys", (0, 1), title, "static")
    left, right = below.subplots(1, 2) if several else (below.subplots(1, 1), None)
    for i, (label, scores) in enumerate(zip(maps.labels, maps.scores, strict=True)):
        ordered = scores.flatten().sort(descending=True).values
        share = 100 * np.arange(1, len(ordered) + 1) / len(ordered)
        left.plot(share, ordered, color=_COLOURS[i % 7], linestyle=_DASHES[i % 4], linewidth=1.4, label=_short(label))
    absolute = maps.settings.get("theta_quantile") is None and maps.settings.get("theta") != "auto"
    if absolute and maps.settings.get("classify") == "auto":
        left.axhline(maps.settings["theta"], color="#888888", linewidth=1, label="theta: static from here")
    left.set_xlabel("heads by decreasing S (%)", fontsize=9)
    left.set_ylabel("S", fontsize=9)
    left.set_title("S of all heads, sorted", fontsize=10, loc="left")
    _finish(left)
    left.legend(fontsize=7, loc="lower left", frameon=False)
    if several:
        _agreement(below, right, maps)
    save_figure(figure, path)


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


def _agreement(figure: Any, ax: Any, maps: PromptHeads) -> None:
    """Draws a matrix of correlations; each cell also has the share of heads that change type."""
    count = len(maps.labels)
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
    labels = [_short(label) for label in maps.labels]
    ax.set_xticks(range(count), labels=labels, rotation=40, ha="right", rotation_mode="anchor", fontsize=8, **_PLAIN)
    ax.set_yticks(range(count), labels=labels, fontsize=8, **_PLAIN)
    ax.set_title("correlation of S between prompts;\nbelow it: heads that change type", fontsize=10, loc="left")
    bar = figure.colorbar(mesh, ax=ax, fraction=0.05)
    bar.ax.tick_params(labelsize=8)


def _on(value: Any) -> str:
    """A text colour that is readable on cividis."""
    return "black" if float(value) > 0.55 else "white"


def draw_sparsity(path: str | Path, result: Sparsity) -> None:
    """Writes a PNG: sparsity of visual and text attention per layer, and agreement with the first layer's evictions."""
    figure = _figure(11, 4.3)
    left, right = figure.subplots(1, 2)
    layers = list(result.layers)
    _band(left, layers, [p.visual for p in result.prompts], 1, "visual tokens")
    _band(left, layers, [p.text for p in result.prompts], 2, "text tokens")
    left.set_title(f"probabilities of text rows <= {THRESHOLD:g}", fontsize=10, loc="left")
    left.set_ylabel("share of probabilities (%)", fontsize=9)
    overlaps = [p.overlap for p in result.prompts if p.overlap is not None]
    if overlaps:
        _band(right, layers, overlaps, 1, "overlap")
        _band(right, layers, [p.lost for p in result.prompts], 3, "attention to images that the layer loses")
        right.axhline(100 * result.mean_chance, color="#555555", linewidth=1, linestyle=":", label="overlap by chance")
        right.axhline(
            100 * PAPER_OVERLAP, color=_COLOURS[2], linewidth=1.2, linestyle="--",
            label=f"{PAPER_OVERLAP:.0%}: the paper's claim, for its models",
        )  # fmt: skip
    else:
        right.set_axis_off()
        right.text(0.5, 0.5, "the first layer evicts nothing", ha="center", va="center", transform=right.transAxes)
    right.set_title("the first layer's evictions: would this layer evict them too?", fontsize=10, loc="left")
    right.set_ylabel("share (%)", fontsize=9)
    for ax in (left, right):
        ax.set_xlabel("layer", fontsize=9)
        ax.set_ylim(-2, 104)
        _finish(ax)
        if ax is left or overlaps:
            ax.legend(fontsize=8, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2)
    several = f"mean of {len(result.prompts)} prompts, band from lowest to highest" if len(result.prompts) > 1 else ""
    figure.suptitle(several or result.prompts[0].label, fontsize=10, **_PLAIN)
    save_figure(figure, path)


def _band(ax: Any, layers: list[int], rows: Sequence[Sequence[float]], style: int, label: str) -> None:
    """Draws the mean over prompts as a line, and their range as a band."""
    values = 100 * torch.tensor([list(row) for row in rows], dtype=torch.float64)
    ax.plot(
        layers, values.mean(0), color=_COLOURS[style], linestyle=_DASHES[style - 1], marker=_MARKERS[style],
        markersize=3.5, linewidth=1.4, label=label,
    )  # fmt: skip
    if len(rows) > 1:
        ax.fill_between(layers, values.amin(0), values.amax(0), color=_COLOURS[style], alpha=0.18, linewidth=0)


def draw_eviction(path: str | Path, result: Eviction) -> None:
    """Writes a PNG: attention lost per layer and step, for greedy eviction and each bin."""
    figure = _figure(13, 4.4)
    first, second, third = figure.subplots(1, 3)
    for i, size in enumerate(result.by_layer):
        name = "greedy (D = 1)" if size == GREEDY else f"bin, D = {size}"
        style = {"color": _COLOURS[i % 7], "linestyle": _DASHES[i % 4], "linewidth": 1.4, "label": name}
        lost = [100 * value for value in result.by_layer[size]]
        first.plot(result.layers, lost, marker=_MARKERS[i % 7], markersize=3.5, **style)
        steps = [100 * value for value in result.by_step[size]]
        second.plot(range(1, len(steps) + 1), steps, **style)
    first.set_xlabel("layer", fontsize=9)
    second.set_xlabel("decode step", fontsize=9)
    first.set_title("attention lost per layer", fontsize=10, loc="left")
    second.set_title("attention lost per step (mean of layers)", fontsize=10, loc="left")
    for ax in (first, second):
        ax.set_ylabel("share of the full cache's attention (%)", fontsize=9)
        ax.set_ylim(bottom=0)
        _finish(ax)
        ax.legend(fontsize=8, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2)
    sizes = list(dict.fromkeys(r.size for r in result.results))
    for i, (matched, hatch) in enumerate((("steady size", ""), ("peak", "///"))):
        shares = {r.size: 100 * r.at_most_greedy for r in result.results if r.matched == matched}
        places = [sizes.index(size) + (i - 0.5) * 0.38 for size in shares]
        colour = (_COLOURS[1], _COLOURS[5])[i]
        bars = third.bar(
            places, list(shares.values()), 0.36, color=colour, hatch=hatch, edgecolor="white", label=f"same {matched}"
        )
        third.bar_label(bars, labels=[f"{share:.0f}" for share in shares.values()], fontsize=8, padding=2)
    third.set_xticks(range(len(sizes)), labels=[f"D = {size}" for size in sizes])
    third.set_ylim(0, 112)
    third.set_ylabel("share of traces (%)", fontsize=9)
    third.set_title("traces on which the bin loses no more", fontsize=10, loc="left")
    _finish(third)
    third.legend(fontsize=8, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2)
    save_figure(figure, path)


def _short(label: str) -> str:
    return label if len(label) <= 24 else label[:21] + "..."


def _finish(ax: Any) -> None:
    ax.spines[["top", "right"]].set_visible(False)
    ax.tick_params(labelsize=8)

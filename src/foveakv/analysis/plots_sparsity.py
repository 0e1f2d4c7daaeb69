"""Plot of sparsity, of what layers would evict, and of each layer as the one that decides."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from foveakv.analysis.plot_style import COLOURS, DASHES, MARKERS, band, below, finish, short
from foveakv.analysis.sparsity import PAPER_OVERLAP, THRESHOLD, Sparsity
from foveakv.analysis.viz import _PLAIN, _figure
from foveakv.util.files import save_figure

_ROWS = {"sum": "a_j, the sum over text rows", "mean": "a_j / rows that see j"}


def draw_sparsity(path: str | Path, result: Sparsity) -> None:
    """Writes a PNG: sparsity, overlaps with the first layer's evictions, layers that decide, and variances."""
    figure = _figure(11, 13)
    axes = figure.subplots(3, 2)
    layers = list(result.layers)
    _sparsity(axes[0][0], layers, result)
    _overlap(axes[0][1], layers, result)
    _deciding(axes[1][0], layers, result, "best", "every layer's own best tokens that are kept")
    _deciding(axes[1][1], layers, result, "lost", "attention to images that layers lose")
    _variance(axes[2][0], layers, result)
    _variance_of_prompts(axes[2][1], result)
    for ax in axes.flatten()[:5]:
        ax.set_xlabel("layer", fontsize=9)
    axes[1][0].set_xlabel("layer that decides for all", fontsize=9)
    axes[1][1].set_xlabel("layer that decides for all", fontsize=9)
    for ax in axes.flatten()[:4]:
        ax.set_ylim(-2, 104)
    for ax in axes.flatten():
        if ax.axison:
            finish(ax)
            below(ax)
    several = f"mean of {len(result.prompts)} prompts, band from lowest to highest" if len(result.prompts) > 1 else ""
    figure.suptitle(several or result.prompts[0].label, fontsize=10, **_PLAIN)
    save_figure(figure, path)


def _sparsity(ax: Any, layers: list[int], result: Sparsity) -> None:
    band(ax, layers, [p.visual for p in result.prompts], 1, "visual tokens")
    band(ax, layers, [p.text for p in result.prompts], 2, "text tokens")
    band(ax, layers, [p.overall for p in result.prompts], 3, "all tokens")
    of = "visible" if result.per == "visible" else "all"
    ax.set_title(f"probabilities of text rows <= {THRESHOLD:g}", fontsize=10, loc="left")
    ax.set_ylabel(f"share of {of} pairs (%)", fontsize=9)


def _overlap(ax: Any, layers: list[int], result: Sparsity) -> None:
    evicting = [p for p in result.prompts if p.rule_overlap is not None and p.overlap is not None]
    ax.set_title("the first layer's evictions: would this layer evict them too?", fontsize=10, loc="left")
    if not evicting:
        ax.set_axis_off()
        ax.text(0.5, 0.5, "the first layer evicts nothing", ha="center", va="center", transform=ax.transAxes)
        return
    band(ax, layers, [p.rule_overlap or [] for p in evicting], 1, "overlap by the same rule")
    band(ax, layers, [p.overlap or [] for p in evicting], 2, "overlap of the same number")
    band(ax, layers, [p.lost for p in evicting], 3, "attention to images that the layer loses")
    chance = [100 * sum(p.rule_chance[i] for p in evicting) / len(evicting) for i in range(len(layers))]
    ax.plot(layers, chance, color=COLOURS[1], linewidth=1, linestyle=":", label="by chance, same rule")
    ax.axhline(100 * result.mean_chance, color=COLOURS[2], linewidth=1, linestyle=":", label="by chance, same number")
    claim = f"{PAPER_OVERLAP:.0%}: the paper, Phi-3.5-Vision"
    ax.axhline(100 * PAPER_OVERLAP, color="#555555", linewidth=1.2, linestyle="--", label=claim)
    ax.set_ylabel("share (%)", fontsize=9)


def _deciding(ax: Any, layers: list[int], result: Sparsity, key: str, title: str) -> None:
    for i, (rows, label) in enumerate(_ROWS.items()):
        band(ax, layers, [getattr(p.deciding[rows], key) for p in result.prompts], i + 1, label)
    kept = result.deciding["sum"].kept
    chance = kept if key == "best" else 1 - kept
    ax.axhline(100 * chance, color="#555555", linewidth=1, linestyle=":", label="by chance")
    ax.set_title(f"one layer keeps {kept:.0%} for all: {title}", fontsize=10, loc="left")
    ax.set_ylabel("mean over layers (%)", fontsize=9)


def _variance(ax: Any, layers: list[int], result: Sparsity) -> None:
    for i, key in enumerate(("visual", "text")):
        values = [getattr(p, f"{key}_variance") for p in result.prompts]
        means = [sum(column) / len(values) for column in zip(*values, strict=True)]
        ax.plot(
            layers, means, color=COLOURS[i + 1], linestyle=DASHES[i], marker=MARKERS[i + 1], markersize=3.5,
            linewidth=1.4, label=f"{key} tokens",
        )  # fmt: skip
    ax.set_yscale("log")
    ax.set_title("variance of cumulative scores a_j over tokens", fontsize=10, loc="left")
    ax.set_ylabel("variance, mean over prompts", fontsize=9)


def _variance_of_prompts(ax: Any, result: Sparsity) -> None:
    """The first layer's variances of each prompt, as in Fig. 2 of the paper."""
    places = range(len(result.prompts))
    for i, key in enumerate(("visual", "text")):
        values = [getattr(p, f"{key}_variance")[0] for p in result.prompts]
        ax.plot(places, values, color=COLOURS[i + 1], linestyle="", marker=MARKERS[i + 1], label=f"{key} tokens")
    ax.set_yscale("log")
    few = len(result.prompts) <= 8
    labels = [short(p.label) for p in result.prompts] if few else None
    ax.set_xticks(places if few else [], labels=labels, rotation=20, ha="right", fontsize=8, **_PLAIN)
    ax.set_xlabel("" if few else "prompts", fontsize=9)
    ax.set_title("the same in the first layer, of each prompt", fontsize=10, loc="left")
    ax.set_ylabel("variance", fontsize=9)

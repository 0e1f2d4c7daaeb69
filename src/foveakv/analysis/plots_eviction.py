"""Plot of the analysis of recycle bins and greedy eviction."""

from __future__ import annotations

from pathlib import Path

from foveakv.analysis.eviction import GREEDY, Eviction
from foveakv.analysis.plot_style import COLOURS, DASHES, MARKERS, below, finish
from foveakv.analysis.viz import _figure
from foveakv.util.files import save_figure


def draw_eviction(path: str | Path, result: Eviction) -> None:
    """Writes a PNG: attention lost per layer and step, for greedy eviction and each bin."""
    figure = _figure(13, 4.4)
    first, second, third = figure.subplots(1, 3)
    for i, size in enumerate(result.by_layer):
        name = "greedy (D = 1)" if size == GREEDY else f"bin, D = {size}"
        style = {"color": COLOURS[i % 7], "linestyle": DASHES[i % 4], "linewidth": 1.4, "label": name}
        lost = [100 * value for value in result.by_layer[size]]
        first.plot(result.layers, lost, marker=MARKERS[i % 7], markersize=3.5, **style)
        steps = [100 * value for value in result.by_step[size]]
        second.plot(range(1, len(steps) + 1), steps, **style)
    first.set_xlabel("layer", fontsize=9)
    second.set_xlabel("decode step", fontsize=9)
    first.set_title("attention lost per layer", fontsize=10, loc="left")
    second.set_title("attention lost per step (mean of layers)", fontsize=10, loc="left")
    for ax in (first, second):
        ax.set_ylabel("share of the full cache's attention (%)", fontsize=9)
        ax.set_ylim(bottom=0)
        finish(ax)
        below(ax)
    sizes = list(dict.fromkeys(r.size for r in result.results))
    for i, (matched, hatch) in enumerate((("steady size", ""), ("peak", "///"))):
        shares = {r.size: 100 * r.at_most_greedy for r in result.results if r.matched == matched}
        places = [sizes.index(size) + (i - 0.5) * 0.38 for size in shares]
        colour = (COLOURS[1], COLOURS[5])[i]
        bars = third.bar(
            places, list(shares.values()), 0.36, color=colour, hatch=hatch, edgecolor="white", label=f"same {matched}"
        )
        third.bar_label(bars, labels=[f"{share:.0f}" for share in shares.values()], fontsize=8, padding=2)
    third.set_xticks(range(len(sizes)), labels=[f"D = {size}" for size in sizes])
    third.set_ylim(0, 112)
    third.set_ylabel("share of traces (%)", fontsize=9)
    third.set_title("traces on which the bin loses no more", fontsize=10, loc="left")
    finish(third)
    below(third)
    save_figure(figure, path)

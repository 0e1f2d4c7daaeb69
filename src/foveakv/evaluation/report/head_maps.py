"""Maps over layers and KV heads: how often each head was static."""

from __future__ import annotations

from collections.abc import Sequence

from foveakv.evaluation.figures import StaticHeads
from foveakv.evaluation.report.svg import INK, POINT, Plot, figure, shorten, to_svg


def static_plots(maps: Sequence[StaticHeads]) -> list[Plot]:
    """One map per entry: the share of items in which each head was static."""
    return [_static_plot(f"static-{number}", found) for number, found in enumerate(maps, 1)]


def _static_plot(name: str, found: StaticHeads) -> Plot:
    layers, heads = found.share.shape
    cell = min(16.0, 296.0 / layers)
    width, height = 352.0, max(heads * cell, 30.0)
    left, bottom, top = 46.0, 38.0, 26.0
    total = height + bottom + top
    drawn = figure(width / POINT, total / POINT)
    axes = drawn.add_axes((left / width, bottom / total, layers * cell / width, height / total))
    axes.pcolormesh(found.share.T, cmap="cividis", vmin=0, vmax=1, edgecolor="face", linewidth=0.2)
    axes.invert_yaxis()
    for axis, count, room in ((axes.xaxis, layers, cell), (axes.yaxis, heads, height / heads)):
        step = next(step for step in (1, 2, 5, 10, 20, 50, 100) if step * room >= 13)
        axis.set_ticks([i + 0.5 for i in range(0, count, step)], [str(i) for i in range(0, count, step)])
    axes.tick_params(length=0, labelsize=8, labelcolor=INK)
    for side in axes.spines.values():
        side.set_visible(False)
    axes.set_xlabel("layer", fontsize=8.5, color=INK)
    axes.set_ylabel("KV head", fontsize=8.5, color=INK)
    title = shorten(", ".join(found.labels), 56)
    drawn.text(0.01, 1 - 14 / total, title, fontsize=9.5, color=INK, weight="bold", parse_math=False)
    return Plot(name, f"Static heads of {title}", to_svg(drawn, name))


def scale_plot() -> Plot:
    """The colour scale of the maps."""
    from matplotlib.cm import ScalarMappable

    width, total = 300.0, 40.0
    drawn = figure(width / POINT, total / POINT)
    axes = drawn.add_axes((0.05, 0.72, 0.9, 0.24))
    scale = ScalarMappable(cmap="cividis")
    scale.set_clim(0, 1)
    bar = drawn.colorbar(scale, cax=axes, orientation="horizontal")
    if bar.solids is not None:
        bar.solids.set_rasterized(False)
        bar.solids.set_edgecolor("face")
    bar.outline.set_visible(False)
    bar.set_ticks([0, 0.25, 0.5, 0.75, 1], labels=["0%", "25%", "50%", "75%", "100%"])
    axes.tick_params(length=0, labelsize=8, labelcolor=INK)
    axes.set_xlabel("share of items in which the head was static", fontsize=8.5, color=INK, labelpad=2)
    return Plot("static-scale", "Scale of the maps", to_svg(drawn, "static-scale"))

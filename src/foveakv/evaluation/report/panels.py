"""One panel of curves: accuracy against a budget, bytes or time, with a name at every line."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from foveakv.evaluation.bootstrap import Interval
from foveakv.evaluation.report.labels import spread
from foveakv.evaluation.report.svg import INK, LINES, POINT, Look, Plot, figure, shorten, to_svg

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True)
class Point:
    """A point of a curve. x: a share, a ratio, tokens or bytes. y: accuracy, 0 to 1."""

    x: float
    y: Interval


@dataclass(frozen=True)
class Curve:
    """The points of a series. level: a horizontal line, for a method without a budget."""

    series: str
    points: tuple[Point, ...]
    level: bool = False


def curves(
    name: str,
    title: str,
    x_label: str,
    lines: Sequence[Curve],
    styles: Mapping[str, Look],
    ticks: Sequence[tuple[float, str]],
) -> Plot:
    """One panel: accuracy in percent against x on a log axis.

    The names of the lines are at the left, where lines are farthest apart; the scale is at the right.

    Args:
        name: of the file, without the suffix.
        title, x_label: texts of the panel.
        lines: one curve per series.
        styles: series -> look.
        ticks: (x, text) of the x axis; those that do not fit are left out.
    """
    names, width, plot, height = 108.0, 352.0, 208.0, 290.0
    height = max(height, 13.0 * len(lines))
    bottom, top = 42.0, 26.0
    total = height + bottom + top
    drawn = figure(width / POINT, total / POINT)
    axes = drawn.add_axes((names / width, bottom / total, plot / width, height / total))
    axes.set_xscale("log")
    _limits(axes, lines, ticks)
    fitting = _spread_ticks(axes, ticks, plot)
    axes.set_xticks([at for at, _ in fitting], [text for _, text in fitting])
    axes.set_xticks([], minor=True)
    low, high = axes.get_ylim()
    step = 5 if high - low < 40 else 20
    axes.set_yticks([at for at in range(0, 101, step) if low <= at <= high])
    axes.yaxis.tick_right()
    axes.tick_params(length=0, labelsize=8.5, labelcolor=INK, pad=3)
    axes.grid(True, color=LINES, linewidth=0.6)
    axes.set_axisbelow(True)
    for side in axes.spines.values():
        side.set_visible(False)
    axes.set_xlabel(x_label, fontsize=8.5, color=INK)
    drawn.text((names + plot + 34) / width, 1 - 14 / total, "accuracy, %", fontsize=8.5, color=INK, ha="right")
    drawn.text(0.01, 1 - 14 / total, title, fontsize=10, color=INK, weight="bold", parse_math=False)
    _draw_lines(axes, lines, styles)
    _draw_names(axes, lines, styles, plot, height)
    return Plot(name, f"{title}: accuracy against {x_label}", to_svg(drawn, name))


def _draw_lines(axes: Axes, lines: Sequence[Curve], styles: Mapping[str, Look]) -> None:
    for place, line in enumerate(lines):
        look = styles[line.series]
        gid = f"series-{look.number}-"
        ys = [100 * point.y.mean for point in line.points]
        if line.level:
            axes.axhline(
                ys[0], color=look.colour, linestyle=look.dash, linewidth=look.width, gid=f"{gid}line", zorder=2.5
            )
            continue
        # Shift each line a few pixels, so that intervals at the same budget are drawn side by side.
        nudge = 1.0 if len(lines) < 2 else 10 ** (_span(axes) * 0.06 * (place / (len(lines) - 1) - 0.5))
        xs = [point.x * nudge for point in line.points]
        for x, point in zip(xs, line.points, strict=True):
            if point.y.known:
                axes.plot(
                    [x, x], [100 * point.y.low, 100 * point.y.high],
                    color=look.colour, linewidth=0.8, alpha=0.5, gid=f"{gid}interval", solid_capstyle="butt",
                )  # fmt: skip
        axes.plot(
            xs, ys, color=look.colour, linestyle=look.dash, linewidth=look.width, marker=look.marker or "o",
            markersize=4.2, gid=f"{gid}line", zorder=3,
        )  # fmt: skip


def _draw_names(axes: Axes, lines: Sequence[Curve], styles: Mapping[str, Look], plot: float, height: float) -> None:
    """Names in the left margin, each as near as possible to the height of its line. Sizes in points."""
    low, high = axes.get_ylim()
    starts = [min(line.points, key=lambda point: point.x) for line in lines]
    wanted = [height * (100 * start.y.mean - low) / (high - low) for start in starts]
    gap = min(12.5, height / max(len(lines), 1))
    left = axes.get_xlim()[0]
    for line, start, at, own in zip(lines, starts, spread(wanted, gap, 0, height), wanted, strict=True):
        look = styles[line.series]
        gid = f"series-{look.number}-"
        x = 0.0
        if not line.level:
            x = plot * math.log10(start.x / left) / _span(axes)
        transform = _points(axes, plot, height)
        axes.plot(
            [-6, -1, x], [at, own, own], color=look.colour, linewidth=0.6, alpha=0.7,
            transform=transform, clip_on=False, gid=f"{gid}leader",
        )  # fmt: skip
        axes.plot(
            [-12], [at], color=look.colour, marker=look.marker or "_", markersize=4.2 if look.marker else 7,
            transform=transform, clip_on=False, gid=f"{gid}mark",
        )  # fmt: skip
        axes.text(
            -19, at, shorten(line.series), fontsize=8, color=INK, ha="right", va="center_baseline", transform=transform,
            gid=f"{gid}name", parse_math=False,
        )  # fmt: skip


def _limits(axes: Axes, lines: Sequence[Curve], ticks: Sequence[tuple[float, str]]) -> None:
    """Axis limits that include all points and intervals; the y axis starts at a round number."""
    ys = [
        value
        for line in lines
        for point in line.points
        for value in (point.y.mean, point.y.low, point.y.high)
        if not math.isnan(value)
    ]
    low, high = 100 * min(ys, default=0), 100 * max(ys, default=1)
    axes.set_ylim(min(10 * math.floor((low - 1) / 10), 80) if low >= 2 else -2, min(max(high, low + 10) + 2, 102))
    xs = [point.x for line in lines if not line.level for point in line.points] or [at for at, _ in ticks]
    wide = (max(xs) / min(xs)) ** 0.06
    wide = max(wide, 1.08)
    axes.set_xlim(min(xs) / wide, max(xs) * wide)


def _spread_ticks(axes: Axes, ticks: Sequence[tuple[float, str]], plot: float) -> list[tuple[float, str]]:
    """The ticks within the axis limits, without those whose labels would overlap."""
    low, high = axes.get_xlim()
    found: list[tuple[float, str]] = []
    last = -math.inf
    for at, text in ticks:
        where = plot * math.log10(at / low) / math.log10(high / low)
        half = 2.6 * len(text)
        if low <= at <= high and where - half > last:
            found.append((at, text))
            last = where + half + 4
    return found


def _span(axes: Axes) -> float:
    """Length of the x axis in decades."""
    low, high = axes.get_xlim()
    return math.log10(high / low)


def _points(axes: Axes, plot: float, height: float) -> Any:
    """Transform for coordinates in points from the lower left corner of the axes."""
    from matplotlib.transforms import Affine2D

    return Affine2D().scale(1 / plot, 1 / height) + axes.transAxes

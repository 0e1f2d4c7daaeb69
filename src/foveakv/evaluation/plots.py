"""A report's pictures, as SVG text: curves with a name at every line, and maps of static heads.

One picture per panel, so that a page can lay them out in as many columns as it has room for. The same method has the
same colour, dash and marker everywhere. Colours come from Okabe and Ito's palette, which is told apart without colour
vision; methods of equal colour differ in dash and marker.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from foveakv.errors import MissingDependencyError
from foveakv.evaluation.results import FULL
from foveakv.evaluation.stratified import Interval
from foveakv.evaluation.summary import FLOOR, Candidate, StaticHeads, Summary
from foveakv.evaluation.tables import budget_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLOURS = ("#E69F00", "#56B4E9", "#009E73", "#0072B2", "#D55E00", "#CC79A7")
_DASHES: tuple[Any, ...] = ("solid", (0, (5, 2)), (0, (1.2, 1.6)), (0, (6, 1.5, 1.2, 1.5)))
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "p", "<", "h", ">", "d", "*")
_GREY = "#888888"
# Stand-ins that are replaced in the SVG text, so that a page can use its own colours in light and dark.
_INK, _LINES = "#010203", "#c0c1c2"
_POINT = 72.0  # SVG user units per inch


@dataclass(frozen=True)
class Look:
    """How a series is drawn. number: its place, for the page's style classes."""

    number: int
    colour: str
    dash: Any
    marker: str
    width: float = 1.5


@dataclass(frozen=True)
class Point:
    """x: share, ratio, tokens or bytes. y: accuracy, 0 to 1."""

    x: float
    y: Interval


@dataclass(frozen=True)
class Curve:
    """level: a method without a budget has one accuracy and no x of its own; it is drawn as a level line."""

    series: str
    points: tuple[Point, ...]
    level: bool = False


@dataclass(frozen=True)
class Picture:
    """name: the file's, without its ending. svg: with stand-in colours; `file` and `inline` put real ones in."""

    name: str
    title: str
    svg: str

    def file(self) -> str:
        """For a file of its own: black on white."""
        return self.svg.replace(_INK, "#000000").replace(_LINES, "#cccccc")

    def inline(self) -> str:
        """For a page: text in the page's colour, lines in its `--grid`, ids that no other picture has."""
        text = self.svg[self.svg.index("<svg") :]
        text = text.replace(_INK, "currentColor").replace(_LINES, "var(--grid)")
        text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.S)
        text = re.sub(r'id="series-(\d+)[^"]*"', r'class="series s\1"', text)
        text = re.sub(r'(id="|href="#|url\(#)', rf"\g<1>{self.name}-", text)
        return re.sub(r'<svg[^>]*?width="([\d.]+)pt" height="([\d.]+)pt"', self._open, text, count=1)

    def _open(self, match: re.Match[str]) -> str:
        return (
            f'<svg role="img" aria-label="{_attribute(self.title)}" xmlns:xlink="http://www.w3.org/1999/xlink" '
            f'width="{match[1]}" height="{match[2]}"'
        )


def looks(series: Sequence[str], methods: dict[str, str]) -> dict[str, Look]:
    """A look for every series. methods: series -> method; the full cache is plain ink, random is grey."""
    found: dict[str, Look] = {}
    others = 0
    for place, name in enumerate(series):
        if methods[name] == FULL:
            found[name] = Look(place, _INK, "solid", "", 1.3)
        elif methods[name] == FLOOR and name == FLOOR:
            found[name] = Look(place, _GREY, (0, (2, 1.5)), "x", 1.5)
        else:
            round_ = others // len(_COLOURS)
            dash = _DASHES[round_ % len(_DASHES)]
            found[name] = Look(place, _COLOURS[others % len(_COLOURS)], dash, _MARKERS[others % len(_MARKERS)])
            others += 1
    return found


def swatch(look: Look) -> str:
    """A piece of the line with its marker, as the inside of a small SVG (26 x 10)."""
    figure = _figure(26 / _POINT, 10 / _POINT)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.axis("off")
    axes.set_xlim(0, 1)
    axes.set_ylim(-1, 1)
    axes.plot([0.02, 0.98], [0, 0], color=look.colour, linestyle=look.dash, linewidth=look.width + 0.3)
    axes.plot([0.5], [0], color=look.colour, marker=look.marker, markersize=5.5)
    whole = Picture(f"swatch{look.number}", "", _svg(figure, f"swatch{look.number}")).inline()
    return re.sub(r"^<svg.*?>|</svg>\s*$", "", whole, flags=re.S)


def curves(
    name: str,
    title: str,
    x_label: str,
    lines: Sequence[Curve],
    styles: dict[str, Look],
    ticks: Sequence[tuple[float, str]],
) -> Picture:
    """One panel: accuracy (percent) against x on a log axis.

    Every line's name stands at the left, where lines lie farthest apart; the scale is at the right.
    """
    names, width, plot, height = 108.0, 352.0, 208.0, 290.0
    height = max(height, 13.0 * len(lines))
    bottom, top = 42.0, 26.0
    total = height + bottom + top
    figure = _figure(width / _POINT, total / _POINT)
    axes = figure.add_axes((names / width, bottom / total, plot / width, height / total))
    axes.set_xscale("log")
    _limits(axes, lines, ticks)
    fitting = _spread_ticks(axes, ticks, plot)
    axes.set_xticks([at for at, _ in fitting], [text for _, text in fitting])
    axes.set_xticks([], minor=True)
    low, high = axes.get_ylim()
    step = 5 if high - low < 40 else 20
    axes.set_yticks([at for at in range(0, 101, step) if low <= at <= high])
    axes.yaxis.tick_right()
    axes.tick_params(length=0, labelsize=8.5, labelcolor=_INK, pad=3)
    axes.grid(True, color=_LINES, linewidth=0.6)
    axes.set_axisbelow(True)
    for side in axes.spines.values():
        side.set_visible(False)
    axes.set_xlabel(x_label, fontsize=8.5, color=_INK)
    figure.text((names + plot + 34) / width, 1 - 14 / total, "accuracy, %", fontsize=8.5, color=_INK, ha="right")
    figure.text(0.01, 1 - 14 / total, title, fontsize=10, color=_INK, weight="bold", parse_math=False)
    _draw_lines(axes, lines, styles)
    _draw_names(axes, lines, styles, plot, height)
    return Picture(name, f"{title}: accuracy against {x_label}", _svg(figure, name))


def accuracy_pictures(summary: Summary, styles: dict[str, Look]) -> list[Picture]:
    """Accuracy against the budget: the mean over ranking tasks, then every task; once per kind of budget."""
    found = []
    for kind in dict.fromkeys(budget.kind for budget in summary.budgets):
        own = [budget for budget in summary.budgets if budget.kind == kind]
        ticks = [(float(budget.value), budget_text(budget).removesuffix(" tokens")) for budget in own]
        label = {
            "ratio": "budget, share of the prompt (log scale)",
            "tokens": "budget, tokens per head (log scale)",
            "bytes": "budget, bytes (log scale)",
        }[kind]
        panels: list[tuple[str, str, list[str]]] = []
        if len(summary.ranked) > 1:
            panels.append(("mean", f"Mean of {len(summary.ranked)} ranking tasks", summary.ranked))
        slugs = _slugs(summary.tasks)
        for task in summary.tasks:
            mark = "" if summary.states[task].ranked else " (not used to rank)"
            panels.append((slugs[task], f"{task}{mark}", [task]))
        for part, title, tasks in panels:
            lines = [_curve(series, members, kind) for series, members in _members(summary, tasks).items()]
            name = f"accuracy-{part}" if kind == "ratio" else f"accuracy-{kind}-{part}"
            lines = [line for line in lines if line.points]
            if lines:
                found.append(curves(name, title, label, lines, styles, ticks))
    return found


def _curve(series: str, members: Sequence[tuple[Candidate, Interval]], kind: str) -> Curve:
    """Through the members with a budget of this kind; level, where there are none, through one without a budget."""
    points = tuple(Point(float(c.budget.value), y) for c, y in members if c.budget and c.budget.kind == kind)
    level = tuple(Point(math.nan, y) for c, y in members if c.budget is None)[:1]
    return Curve(series, points or level, level=not points)


def cost_pictures(summary: Summary, styles: dict[str, Look]) -> list[Picture]:
    """Accuracy against stored bytes, and against time per token; means over ranking tasks.

    Where none ranks, over the tasks on which every candidate has a result; without such a task there is no picture.
    """
    every = [task for task in summary.tasks if all(summary.cells[task, c.label].n for c in summary.candidates)]
    tasks = summary.ranked or every
    if not tasks:
        return []
    over = tasks[0]
    if len(tasks) > 1:
        over = f"mean of {len(tasks)} {'ranking tasks' if summary.ranked else 'tasks'}"
    bytes_ticks = [(x, f"{100 * x:g}%") for x in (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)]
    time_ticks = [
        (x, f"{x:g}") for x in (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0, 20.0, 50.0)
    ]
    found = []
    for name, title, label, field, ticks in (
        ("bytes", f"Bytes, {over}", "stored bytes, share of a full cache's (log scale)", "stored", bytes_ticks),
        ("time", f"Time, {over}", "time per token, full cache = 1 (log scale)", "time", time_ticks),
    ):
        lines = []
        for series, members in _members(summary, tasks).items():
            points = []
            for candidate, y in members:
                costs = [getattr(summary.cells[task, candidate.label], field) for task in tasks]
                if all(cost is not None and cost > 0 for cost in costs):
                    points.append(Point(sum(costs) / len(costs), y))
            if points:
                lines.append(Curve(series, tuple(points)))
        if lines:
            found.append(curves(f"accuracy-{name}", title, label, lines, styles, ticks))
    return found


def static_pictures(maps: Sequence[StaticHeads]) -> list[Picture]:
    """A map per candidate: how often each head was static."""
    return [_static_picture(f"static-{number}", found) for number, found in enumerate(maps, 1)]


def _static_picture(name: str, found: StaticHeads) -> Picture:
    layers, heads = found.share.shape
    cell = min(16.0, 296.0 / layers)
    width, height = 352.0, max(heads * cell, 30.0)
    left, bottom, top = 46.0, 38.0, 26.0
    total = height + bottom + top
    figure = _figure(width / _POINT, total / _POINT)
    axes = figure.add_axes((left / width, bottom / total, layers * cell / width, height / total))
    axes.pcolormesh(found.share.T, cmap="cividis", vmin=0, vmax=1, edgecolor="face", linewidth=0.2)
    axes.invert_yaxis()
    for axis, count, room in ((axes.xaxis, layers, cell), (axes.yaxis, heads, height / heads)):
        step = next(step for step in (1, 2, 5, 10, 20, 50, 100) if step * room >= 13)
        axis.set_ticks([i + 0.5 for i in range(0, count, step)], [str(i) for i in range(0, count, step)])
    axes.tick_params(length=0, labelsize=8, labelcolor=_INK)
    for side in axes.spines.values():
        side.set_visible(False)
    axes.set_xlabel("layer", fontsize=8.5, color=_INK)
    axes.set_ylabel("KV head", fontsize=8.5, color=_INK)
    title = _short(", ".join(found.labels), 56)
    figure.text(0.01, 1 - 14 / total, title, fontsize=9.5, color=_INK, weight="bold", parse_math=False)
    return Picture(name, f"Static heads of {title}", _svg(figure, name))


def scale_picture() -> Picture:
    """What the colours of the maps mean."""
    from matplotlib.cm import ScalarMappable

    width, total = 300.0, 40.0
    figure = _figure(width / _POINT, total / _POINT)
    axes = figure.add_axes((0.05, 0.72, 0.9, 0.24))
    scale = ScalarMappable(cmap="cividis")
    scale.set_clim(0, 1)
    bar = figure.colorbar(scale, cax=axes, orientation="horizontal")
    if bar.solids is not None:
        bar.solids.set_rasterized(False)
        bar.solids.set_edgecolor("face")
    bar.outline.set_visible(False)
    bar.set_ticks([0, 0.25, 0.5, 0.75, 1], labels=["0%", "25%", "50%", "75%", "100%"])
    axes.tick_params(length=0, labelsize=8, labelcolor=_INK)
    axes.set_xlabel("share of items in which the head was static", fontsize=8.5, color=_INK, labelpad=2)
    return Picture("static-scale", "Scale of the maps", _svg(figure, "static-scale"))


def _members(summary: Summary, tasks: Sequence[str]) -> dict[str, list[tuple[Candidate, Interval]]]:
    """series -> its candidates with their mean accuracy, small budgets first; without those that lack a task."""
    from foveakv.evaluation import stratified as strata

    found: dict[str, list[tuple[Candidate, Interval]]] = {}
    for series in summary.series:
        own = sorted((c for c in summary.candidates if c.series == series), key=lambda c: c.place)
        for candidate in own:
            scores = [strata.common([summary.scores(task, candidate.label)]) for task in tasks]
            if all(map(len, scores)):
                y = strata.mean(scores, lambda means: means[..., 0])
                found.setdefault(series, []).append((candidate, y))
    return found


def _draw_lines(axes: Axes, lines: Sequence[Curve], styles: dict[str, Look]) -> None:
    for place, line in enumerate(lines):
        look = styles[line.series]
        gid = f"series-{look.number}-"
        ys = [100 * point.y.mean for point in line.points]
        if line.level:
            axes.axhline(
                ys[0], color=look.colour, linestyle=look.dash, linewidth=look.width, gid=f"{gid}line", zorder=2.5
            )
            continue
        # A nudge of a few pixels, so that the intervals of methods at the same budget stand side by side.
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


def _draw_names(axes: Axes, lines: Sequence[Curve], styles: dict[str, Look], plot: float, height: float) -> None:
    """Names in the left margin, each at its line's height or as near to it as the others leave it. Sizes in points."""
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
            -19, at, _short(line.series), fontsize=8, color=_INK, ha="right", va="center_baseline", transform=transform,
            gid=f"{gid}name", parse_math=False,
        )  # fmt: skip


def spread(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Places as near as possible to those wanted, at least `gap` apart and, if there is room, from low to high."""
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    groups: list[list[float]] = []  # [middle, count] of runs that touch each other
    for i in order:
        groups.append([wanted[i], 1])
        while len(groups) > 1 and _touch(groups[-2], groups[-1], gap):
            second, first = groups.pop(), groups.pop()
            count = first[1] + second[1]
            groups.append([(first[0] * first[1] + second[0] * second[1]) / count, count])
        _clamp(groups[-1], gap, low, high)
        while len(groups) > 1 and _touch(groups[-2], groups[-1], gap):
            second, first = groups.pop(), groups.pop()
            count = first[1] + second[1]
            groups.append([(first[0] * first[1] + second[0] * second[1]) / count, count])
            _clamp(groups[-1], gap, low, high)
    places = [middle + gap * (k - (count - 1) / 2) for middle, count in groups for k in range(int(count))]
    found = [0.0] * len(wanted)
    for i, place in zip(order, places, strict=True):
        found[i] = place
    return found


def _touch(lower: list[float], upper: list[float], gap: float) -> bool:
    return upper[0] - lower[0] < gap * (lower[1] + upper[1]) / 2 - 1e-9


def _clamp(group: list[float], gap: float, low: float, high: float) -> None:
    half = gap * (group[1] - 1) / 2
    group[0] = max(min(group[0], high - half), low + half)


def _limits(axes: Axes, lines: Sequence[Curve], ticks: Sequence[tuple[float, str]]) -> None:
    """Room for all points and intervals; the scale starts at a round number."""
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
    """The ticks that lie on the axis and leave each other room."""
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
    """Decades on the x axis."""
    low, high = axes.get_xlim()
    return math.log10(high / low)


def _points(axes: Axes, plot: float, height: float) -> Any:
    """Coordinates in points from the axes' lower left corner."""
    from matplotlib.transforms import Affine2D

    return Affine2D().scale(1 / plot, 1 / height) + axes.transAxes


def _figure(width: float, height: float) -> Figure:
    """Inches. A figure of its own, outside pyplot's global state."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingDependencyError("a report's plots need matplotlib: pip install 'foveakv[demo]'") from error
    return Figure(figsize=(width, height), facecolor="none")


def _svg(figure: Figure, name: str) -> str:
    """Text stays text; equal figures give equal SVGs."""
    import matplotlib

    style = {"svg.fonttype": "none", "svg.hashsalt": name, "font.family": "sans-serif"}
    with matplotlib.rc_context(style):
        for axes in figure.axes:
            axes.patch.set_alpha(0)
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None}, facecolor="none")
    return out.getvalue()


def _short(text: str, most: int = 17) -> str:
    return text if len(text) <= most else text[: most - 1] + "\u2026"


def _slugs(tasks: Sequence[str]) -> dict[str, str]:
    """Task -> part of a file name, of letters, digits and dashes; each once, and none that another picture has."""
    found: dict[str, str] = {}
    for task in tasks:
        slug = stem = re.sub(r"[^A-Za-z0-9]+", "-", task).strip("-").lower() or "task"
        number = 2
        while slug in found.values() or slug in ("mean", "bytes", "time"):
            slug, number = f"{stem}-{number}", number + 1
        found[task] = slug
    return found


def _attribute(text: str) -> str:
    from html import escape

    return escape(text, quote=True)

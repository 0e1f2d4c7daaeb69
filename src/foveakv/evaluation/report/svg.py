"""Plots as SVG text, and how each series is drawn.

Colours are Okabe and Ito's palette, which is distinguishable with colour vision deficiency; series of equal colour
differ in dash and marker. SVGs hold placeholder colours, so that a page can use its own in light and dark mode.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

from foveakv.errors import MissingDependencyError
from foveakv.evaluation.figures import FLOOR
from foveakv.evaluation.results import FULL

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INK, LINES = "#010203", "#c0c1c2"
"""Placeholders for the colour of text and of grid lines."""
POINT = 72.0
"""SVG user units per inch."""

_COLOURS = ("#E69F00", "#56B4E9", "#009E73", "#0072B2", "#D55E00", "#CC79A7")
_DASHES: tuple[Any, ...] = ("solid", (0, (5, 2)), (0, (1.2, 1.6)), (0, (6, 1.5, 1.2, 1.5)))
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "p", "<", "h", ">", "d", "*")
_GREY = "#888888"


@dataclass(frozen=True)
class Look:
    """How a series is drawn. number: its index, used in the page's style classes."""

    number: int
    colour: str
    dash: Any
    marker: str
    width: float = 1.5


@dataclass(frozen=True)
class Plot:
    """A plot as SVG text with placeholder colours. name: of its file, without the suffix."""

    name: str
    title: str
    svg: str

    def file(self) -> str:
        """SVG for a file: black on white."""
        return self.svg.replace(INK, "#000000").replace(LINES, "#cccccc")

    def inline(self) -> str:
        """SVG for a page: text in the page's colour, lines in its `--grid`, ids that are unique on the page."""
        text = self.svg[self.svg.index("<svg") :]
        text = text.replace(INK, "currentColor").replace(LINES, "var(--grid)")
        text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.S)
        text = re.sub(r'id="series-(\d+)[^"]*"', r'class="series s\1"', text)
        text = re.sub(r'(id="|href="#|url\(#)', rf"\g<1>{self.name}-", text)
        return re.sub(r'<svg[^>]*?width="([\d.]+)pt" height="([\d.]+)pt"', self._open, text, count=1)

    def _open(self, match: re.Match[str]) -> str:
        return (
            f'<svg role="img" aria-label="{escape(self.title, quote=True)}" '
            f'xmlns:xlink="http://www.w3.org/1999/xlink" width="{match[1]}" height="{match[2]}"'
        )


def looks(series: Sequence[str], methods: Mapping[str, str]) -> dict[str, Look]:
    """A look for every series. methods: series -> method; the full cache has the text colour, random is grey."""
    found: dict[str, Look] = {}
    others = 0
    for place, name in enumerate(series):
        if methods[name] == FULL:
            found[name] = Look(place, INK, "solid", "", 1.3)
        elif methods[name] == FLOOR and name == FLOOR:
            found[name] = Look(place, _GREY, (0, (2, 1.5)), "x", 1.5)
        else:
            round_ = others // len(_COLOURS)
            dash = _DASHES[round_ % len(_DASHES)]
            found[name] = Look(place, _COLOURS[others % len(_COLOURS)], dash, _MARKERS[others % len(_MARKERS)])
            others += 1
    return found


def swatch(look: Look) -> str:
    """A sample of the line with its marker, as the content of a small SVG (26 x 10)."""
    drawn = figure(26 / POINT, 10 / POINT)
    axes = drawn.add_axes((0, 0, 1, 1))
    axes.axis("off")
    axes.set_xlim(0, 1)
    axes.set_ylim(-1, 1)
    axes.plot([0.02, 0.98], [0, 0], color=look.colour, linestyle=look.dash, linewidth=look.width + 0.3)
    axes.plot([0.5], [0], color=look.colour, marker=look.marker, markersize=5.5)
    whole = Plot(f"swatch{look.number}", "", to_svg(drawn, f"swatch{look.number}")).inline()
    return re.sub(r"^<svg.*?>|</svg>\s*$", "", whole, flags=re.S)


def figure(width: float, height: float) -> Figure:
    """A matplotlib figure outside pyplot's global state. Sizes in inches.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingDependencyError("a report's plots need matplotlib: pip install 'foveakv[demo]'") from error
    return Figure(figsize=(width, height), facecolor="none")


def to_svg(drawn: Figure, name: str) -> str:
    """The figure as SVG: text stays text, and equal figures give equal SVGs."""
    import matplotlib

    style = {"svg.fonttype": "none", "svg.hashsalt": name, "font.family": "sans-serif"}
    with matplotlib.rc_context(style):
        for axes in drawn.axes:
            axes.patch.set_alpha(0)
        out = io.StringIO()
        drawn.savefig(out, format="svg", metadata={"Date": None, "Creator": None}, facecolor="none")
    return out.getvalue()


def shorten(text: str, most: int = 17) -> str:
    """The text cut to `most` characters, with an ellipsis."""
    return text if len(text) <= most else text[: most - 1] + "\u2026"

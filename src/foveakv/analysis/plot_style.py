"""Style shared by the plots of the analyses. Colours differ in lightness, and lines also in dash and marker."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

COLOURS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
DASHES = ("-", "--", "-.", ":")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")


def short(label: str) -> str:
    """Shorten a label to 24 characters."""
    return label if len(label) <= 24 else label[:21] + "..."


def finish(ax: Any) -> None:
    """Remove the frame above and on the right, and make tick labels small."""
    ax.spines[["top", "right"]].set_visible(False)
    ax.tick_params(labelsize=8)


def band(ax: Any, layers: Sequence[int], rows: Sequence[Sequence[float]], style: int, label: str) -> None:
    """Draws the mean over prompts as a line, and their range as a band."""
    values = 100 * torch.tensor([list(row) for row in rows], dtype=torch.float64)
    ax.plot(
        layers, values.mean(0), color=COLOURS[style], linestyle=DASHES[style - 1], marker=MARKERS[style],
        markersize=3.5, linewidth=1.4, label=label,
    )  # fmt: skip
    if len(rows) > 1:
        ax.fill_between(layers, values.amin(0), values.amax(0), color=COLOURS[style], alpha=0.18, linewidth=0)


def below(ax: Any) -> None:
    """Put the legend below the axes."""
    ax.legend(fontsize=8, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2)

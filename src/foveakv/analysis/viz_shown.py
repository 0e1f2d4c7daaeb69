"""Draw what one method keeps: one row per layer, and a filmstrip of decode steps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from foveakv.analysis.shown import Share, Shown
from foveakv.analysis.viz import _PLAIN, _brightness_bar, _figure, _row_label, shade
from foveakv.core.patches import image_columns
from foveakv.errors import InputError
from foveakv.util.files import save_figure

if TYPE_CHECKING:
    from PIL.Image import Image

_MOST_ROWS = 64


def draw_rows(
    path: str | Path, images: Sequence[Image], result: Shown, *, captions: Sequence[str] = (), title: str = ""
) -> None:
    """Writes a PNG: the images, and below them one row per entry of `result.rows`, with evicted patches dark.

    captions: a short text per image. title: of the figure.

    Raises:
        InputError: the prompt's image tokens cannot be divided among the images, or there are too many rows.
        MissingDependencyError: matplotlib is not installed.
    """
    labels = [(row.label, "") for row in result.rows]
    _draw(path, images, image_columns(result.prompt, images), result.rows, labels, captions, title)


def draw_filmstrip(
    path: str | Path,
    images: Sequence[Image],
    result: Shown,
    *,
    captions: Sequence[str] = (),
    title: str = "",
    texts: Sequence[str] = (),
    frames: int = 8,
) -> None:
    """Writes a PNG: the images, and below them one row per decode step, with the patches it attends to bright.

    texts: the tokens of the answer; step s reads texts[s] and generates texts[s + 1]. frames: maximum number of rows;
    of more steps, evenly spaced ones are drawn.

    Raises:
        InputError: as in `draw_rows`, or `result` has no steps.
        MissingDependencyError: matplotlib is not installed.
    """
    if not result.steps:
        raise InputError("there are no steps to draw; record them with steps=True")
    chosen = evenly(len(result.steps), frames)
    labels = []
    for s in chosen:
        read, made = (_token(texts[i]) if i < len(texts) else "" for i in (s, s + 1))
        labels.append((result.steps[s].label, f"reads {read}\nwrites {made}" if read and made else ""))
    rows = [result.steps[s] for s in chosen]
    title = f"{title}   (decode steps of {rows[0].heads} heads)"
    _draw(path, images, image_columns(result.prompt, images), rows, labels, captions, title)


def evenly(count: int, most: int) -> list[int]:
    """At most `most` evenly spaced numbers below `count`, including the first and the last."""
    if count <= most or most < 2:
        return list(range(min(count, most)))
    return [round(i * (count - 1) / (most - 1)) for i in range(most)]


def _draw(
    path: str | Path,
    images: Sequence[Image],
    columns: Sequence[Tensor],
    rows: Sequence[Share],
    labels: Sequence[tuple[str, str]],
    captions: Sequence[str],
    title: str,
) -> None:
    if len(rows) > _MOST_ROWS:
        raise InputError(f"{len(rows)} rows do not fit in one figure (at most {_MOST_ROWS}); choose fewer layers")
    figure = _figure(max(1.05 * len(images) + 1.9, 6), 1.32 * (len(rows) + 1) + 1.0)
    axes = figure.subplots(len(rows) + 1, len(images), squeeze=False)
    for i, image in enumerate(images):
        axes[0][i].imshow(image)
        caption = captions[i] if i < len(captions) else f"image {i + 1}"
        axes[0][i].set_title(caption if len(caption) <= 16 else caption[:14] + "...", fontsize=8, **_PLAIN)
    _row_label(axes[0][0], "images", "")
    for line, row, (name, below) in zip(axes[1:], rows, labels, strict=True):
        for ax, image, own in zip(line, images, columns, strict=True):
            ax.imshow(shade(image, row.columns[own]), vmin=0, vmax=1)
            ax.set_xlabel(f"{row.columns[own].mean():.0%}", fontsize=8, labelpad=2)
        _row_label(line[0], name, below)
    for ax in axes.flatten():
        ax.set_xticks([])
        ax.set_yticks([])
        for spine in ax.spines.values():
            spine.set_visible(False)
    _brightness_bar(figure, axes)
    figure.suptitle(title if len(title) <= 90 else title[:87] + "...", fontsize=11, **_PLAIN)
    save_figure(figure, path)


def _token(text: str) -> str:
    """A token as a short label, quoted so that spaces are visible."""
    return repr(text if len(text) <= 10 else text[:9] + "...")

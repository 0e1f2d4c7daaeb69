"""Draw what methods keep (kept patches bright, evicted ones dark), and the costs of a comparison."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from foveakv.core.patches import image_columns, patch_grid
from foveakv.errors import InputError, MissingDependencyError
from foveakv.evaluation.compare import BASELINE, Comparison, Row
from foveakv.util.files import save_figure
from foveakv.util.texts import one_line, size_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from PIL.Image import Image

_BAR, _REFERENCE_BAR = "#0072B2", "#888888"  # blue and grey also differ in lightness
_PLAIN: dict[str, Any] = {"parse_math": False}  # no mathtext: an answer may contain dollar signs
_DARK = 0.08  # brightness of a patch that no head keeps


def brightness(share: Any) -> Any:
    """Brightness of a patch that this share of (layer, head) pairs keeps; a root, so that small shares are visible."""
    return _DARK + (1 - _DARK) * share**0.5


def shade(image: Image, share: Tensor, grid: tuple[int, int] | None = None) -> Any:
    """The image as float array [height, width, 3], with the brightness of every patch set by its share (0 to 1).

    share: [tokens] of one image. grid: its (rows, columns); inferred if omitted. An image without a grid has
    the brightness of its mean share.
    """
    import numpy as np
    from PIL import Image as PIL

    pixels = np.asarray(image.convert("RGB"), dtype=np.float32) / 255
    grid = grid or patch_grid(len(share), image.size)
    values = share.reshape(grid).numpy() if grid else np.full((1, 1), float(share.mean()))
    light = PIL.fromarray(brightness(values).astype(np.float32)).resize(image.size, PIL.Resampling.NEAREST)
    return pixels * np.asarray(light)[..., None]


def draw_kept(
    path: str | Path,
    images: Sequence[Image],
    comparison: Comparison,
    *,
    captions: Sequence[str] = (),
    title: str = "",
) -> None:
    """Writes a PNG: the images, and for every method the same images with evicted patches dark.

    Args:
        path: the file to write.
        images: the prompt's images, in order.
        comparison: from `foveakv.evaluation.compare.compare`; rows of the full cache and failed rows are left out.
        captions: a short text per image.
        title: of the figure.

    Raises:
        InputError: no method other than full has a result.
        MissingDependencyError: matplotlib is not installed.
    """
    rows = [row for row in comparison.rows if row.kept is not None and row.settings.get("method") != "full"]
    if comparison.prompt is None or not rows:
        raise InputError("nothing to draw: no method other than full has run")
    columns = image_columns(comparison.prompt, images)
    width, height = 1.05 * len(images) + 1.9, 1.32 * (len(rows) + 1) + 1.0
    figure = _figure(max(width, 6), height)
    axes = figure.subplots(len(rows) + 1, len(images), squeeze=False)
    for i, image in enumerate(images):
        axes[0][i].imshow(image)
        axes[0][i].set_title(captions[i] if i < len(captions) else f"image {i + 1}", fontsize=9, **_PLAIN)
    _row_label(axes[0][0], "images", "")
    for line, row in zip(axes[1:], rows, strict=True):
        share = torch.tensor(row.kept)
        for ax, image, own in zip(line, images, columns, strict=True):
            ax.imshow(shade(image, share[own]), vmin=0, vmax=1)
            ax.set_xlabel(f"{share[own].mean():.0%}", fontsize=8, labelpad=2)
        _row_label(line[0], row.label, _answer(row))
    for ax in axes.flatten():
        ax.set_xticks([])
        ax.set_yticks([])
        for spine in ax.spines.values():
            spine.set_visible(False)
    _brightness_bar(figure, axes)
    figure.suptitle(title, fontsize=11, **_PLAIN)
    save_figure(figure, path)


def draw_comparison(path: str | Path, comparison: Comparison) -> None:
    """Writes a PNG with three bar charts: agreement with the full cache, stored bytes, time per token.

    MissingDependencyError: matplotlib is not installed.
    """
    rows = [row for row in comparison.rows if row.error is None]
    labels = [row.label for row in rows]
    panels: list[tuple[str, list[float], list[str]]] = [
        (
            "leading tokens equal to the full cache's (%)",
            [100 * (1.0 if row.prefix_agreement is None else row.prefix_agreement) for row in rows],
            [f"{100 * (1.0 if row.prefix_agreement is None else row.prefix_agreement):.0f}" for row in rows],
        ),
        (
            "stored bytes, share of a full cache (%)",
            [100 * row.stored_bytes / max(row.full_bytes, 1) for row in rows],
            [size_text(row.stored_bytes) for row in rows],
        ),
        (
            "time per token (ms)",
            [1e3 * (row.token_seconds or 0.0) for row in rows],
            ["-" if row.token_seconds is None else f"{1e3 * row.token_seconds:.1f}" for row in rows],
        ),
    ]
    figure = _figure(13, 1.2 + 0.42 * len(rows))
    axes = figure.subplots(1, 3, sharey=True)
    for ax, (title, values, texts) in zip(axes, panels, strict=True):
        colours = [_REFERENCE_BAR if row.label == BASELINE else _BAR for row in rows]
        bars = ax.barh(labels, values, color=colours, height=0.62)
        ax.bar_label(bars, labels=texts, padding=3, fontsize=9)
        ax.set_xlim(0, 1.22 * max([*values, 1e-9]))
        ax.set_title(title, fontsize=10, loc="left")
        ax.spines[["top", "right"]].set_visible(False)
        ax.tick_params(labelsize=9)
    axes[0].invert_yaxis()
    save_figure(figure, path)


def _answer(row: Row) -> str:
    text = one_line(row.text)
    return f"answer: {text if len(text) <= 16 else text[:15] + '...'}" if text else ""


def _row_label(ax: Any, name: str, below: str) -> None:
    ax.set_ylabel(
        f"{name}\n{below}" if below else name, fontsize=9, rotation=0, ha="right", va="center", labelpad=8, **_PLAIN
    )


def _brightness_bar(figure: Figure, axes: Any) -> None:
    """Adds the grey scale of shares."""
    import numpy as np
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import ListedColormap

    shares = np.linspace(0, 1, 256)
    grey = ListedColormap([(b, b, b) for b in brightness(shares)])
    scale = ScalarMappable(cmap=grey)
    scale.set_clim(0, 1)
    bar = figure.colorbar(scale, ax=axes, orientation="horizontal", fraction=0.03, aspect=60, pad=0.02)
    bar.set_ticks([0, 0.1, 0.25, 0.5, 0.75, 1], labels=["0%", "10%", "25%", "50%", "75%", "100%"])
    bar.ax.tick_params(labelsize=8)
    bar.set_label("share of (layer, head) pairs that keep the patch; below each image: its mean", fontsize=8)


def _figure(width: float, height: float) -> Figure:
    """A matplotlib figure outside pyplot's global state. MissingDependencyError: matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingDependencyError("plots need matplotlib: pip install 'foveakv[demo]'") from error
    return Figure(figsize=(width, height), layout="constrained", facecolor="white")

"""Pictures of kept patches and comparison plots."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_folder
import torch
from PIL import Image

from foveakv.analysis.viz import brightness, draw_comparison, draw_kept, shade
from foveakv.core.patches import image_columns, patch_grid
from foveakv.core.prompt import IMAGE, TEXT, PromptMap
from foveakv.errors import InputError
from foveakv.evaluation.compare import BASELINE, Comparison, Row

pytest.importorskip("matplotlib")

WHITE = Image.new("RGB", (40, 40), "white")
TWO = [WHITE, WHITE]


def prompt(*parts: tuple[int, int]) -> PromptMap:
    """Columns from (kind, count) pairs."""
    return PromptMap(torch.tensor([[kind for kind, count in parts for _ in range(count)]]))


def row(label: str, kept: Any = None, **values: Any) -> Row:
    values = {"stored_bytes": 500, "full_bytes": 1000, "token_seconds": 0.01, "prefix_agreement": 0.5} | values
    return Row(label, {"method": label}, text="costs $3^{ $", kept=None if kept is None else tuple(kept), **values)


def comparison(*rows: Row, map_: PromptMap | None = None) -> Comparison:
    baseline = Row(BASELINE, {"method": BASELINE}, text="an answer", stored_bytes=1000, full_bytes=1000)
    return Comparison((baseline, *rows), 4, 1, 10, 8, {}, map_)


def test_columns_of_separate_images() -> None:
    found = image_columns(prompt((TEXT, 2), (IMAGE, 4), (TEXT, 1), (IMAGE, 6), (TEXT, 3)), TWO)
    assert [columns.tolist() for columns in found] == [[2, 3, 4, 5], [7, 8, 9, 10, 11, 12]]


def test_columns_of_adjacent_images_and_of_pieces() -> None:
    assert [len(columns) for columns in image_columns(prompt((TEXT, 1), (IMAGE, 8), (TEXT, 1)), TWO)] == [4, 4]
    pieces = prompt(*[part for _ in range(6) for part in ((IMAGE, 2), (TEXT, 1))])  # two images in rows of two
    assert [columns.tolist() for columns in image_columns(pieces, TWO)] == [[0, 1, 3, 4, 6, 7], [9, 10, 12, 13, 15, 16]]


def test_columns_that_do_not_divide() -> None:
    with pytest.raises(InputError, match="7 image tokens do not divide among 2 images"):
        image_columns(prompt((IMAGE, 7)), TWO)


def test_pieces_of_unequal_images_cannot_be_told_apart() -> None:
    pieces = prompt(*[part for _ in range(6) for part in ((IMAGE, 2), (TEXT, 1))])
    with pytest.raises(InputError, match="6 pieces of 2 images of different sizes"):
        image_columns(pieces, [WHITE, Image.new("RGB", (64, 32))])


@pytest.mark.parametrize(("tokens", "size", "grid"), [
    (64, (112, 112), (8, 8)),
    (24, (600, 400), (4, 6)),  # the picture's shape
    (16, (640, 480), (4, 4)),  # cropped to a square
    (12, (100, 100), None),  # no square, and 3 x 4 is not this picture's shape
    (7, (10, 10), None),
])  # fmt: skip
def test_grid(tokens: int, size: tuple[int, int], grid: tuple[int, int] | None) -> None:
    assert patch_grid(tokens, size) == grid


def test_kept_patches_are_bright_and_dropped_ones_dark() -> None:
    pixels = shade(WHITE, torch.tensor([1.0, 0.0, 0.0, 0.25]))
    assert pixels.shape == (40, 40, 3)
    assert pixels[5, 5, 0] == pytest.approx(1.0)
    assert pixels[5, 35, 0] == pytest.approx(brightness(0.0))
    assert pixels[35, 35, 0] == pytest.approx(brightness(0.25))


def test_a_picture_without_a_grid_is_dimmed_evenly() -> None:
    pixels = shade(WHITE, torch.tensor([1.0, 0.0, 1.0, 0.0, 1.0, 0.0, 0.0]))
    assert pixels.min() == pixels.max()


def test_kept_png(tmp_path: Path) -> None:
    map_ = prompt((TEXT, 1), (IMAGE, 16), (TEXT, 2), (IMAGE, 16), (TEXT, 1))
    kept = np.linspace(0, 1, 36)
    result = comparison(row("full", kept), row("hae 0.1", kept), row("broken", error="no"), map_=map_)
    file = tmp_path / "kept.png"
    draw_kept(
        file,
        [tiny_folder.picture(0), tiny_folder.picture(1)],
        result,
        captions=["Ann", "Bob"],
        title="Who owes $1 or $2?",
    )
    with Image.open(file) as image:
        assert image.width > 400
        assert image.height > 200


def test_kept_png_needs_a_method(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="nothing to draw"):
        draw_kept(tmp_path / "kept.png", [WHITE], comparison(map_=prompt((IMAGE, 4))))


def test_comparison_png(tmp_path: Path) -> None:
    draw_comparison(tmp_path / "plot.png", comparison(row("hae"), row("one token", token_seconds=None)))
    with Image.open(tmp_path / "plot.png") as image:
        assert image.width > 800


def test_drawing_leaves_pyplot_alone(tmp_path: Path) -> None:
    import sys

    before = "matplotlib.pyplot" in sys.modules
    draw_comparison(tmp_path / "plot.png", comparison(row("hae")))
    assert ("matplotlib.pyplot" in sys.modules) == before

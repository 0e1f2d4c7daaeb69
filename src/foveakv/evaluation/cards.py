"""Images for the tasks: cards with handwriting or print, columns of charts, and photographs.

The glyphs are not in the training data of the embedded model. All randomness comes from the given generator.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, ImageFilter

SIZE = 112
"""Width and height of an image in pixels."""
DATA = Path(__file__).parents[1] / "models" / "data"
SPLITS = {"validation": slice(0, 50), "test": slice(50, 100)}
CHARACTERS = "0123456789ABCDEFGHJKLMNPQRSTUVWXYZ"
"""Printed characters: digits and capitals, without I and O, which resemble 1 and 0."""
TILE = 48
"""Width and height of a printed character in pixels."""
PHOTO = 192
"""Width and height of a photograph in pixels."""
_NAMES = """
Alice Bob Carol David Emma Frank Grace Henry Ivan Julia Kevin Laura Mary Nancy Oliver Paul Rachel Sarah Tom Victor
Adam Anna Ben Daniel George Helen Jack James Jane John Lily Mark Martin Max Michael Peter Robert Sam Simon Thomas
"""
NAMES = _NAMES.split()


@functools.cache
def glyphs(split: str) -> np.ndarray:
    """Handwritten digits of a split, "validation" or "test": uint8 [10 digits, 50, 20, 20]."""
    return _sheet("digits.png").reshape(10, 20, 100, 20).swapaxes(1, 2)[:, SPLITS[split]]


@functools.cache
def print_glyphs(split: str) -> np.ndarray:
    """Printed characters in the fonts of a split: uint8 [34 characters, 8 fonts, 48, 48]."""
    tiles = _sheet("print.png").reshape(len(CHARACTERS), TILE, 16, TILE).swapaxes(1, 2)
    first = 8 * list(SPLITS).index(split)
    return tiles[:, first : first + 8]


@functools.cache
def _sheet(name: str, mode: str = "L") -> np.ndarray:
    with Image.open(DATA / name) as sheet:
        return np.asarray(sheet.convert(mode))


def photograph(rng: np.random.Generator, split: str = "test") -> Image.Image:
    """A random square crop of one of the five photographs of a split, possibly mirrored, [112, 112] RGB."""
    row, column = list(SPLITS).index(split), int(rng.integers(5))
    photo = _sheet("photographs.jpg", "RGB")[PHOTO * row :, PHOTO * column :]
    side = int(rng.integers(72, PHOTO + 1))
    top, left = rng.integers(0, PHOTO - side + 1, 2)
    part = photo[top : top + side, left : left + side]
    if rng.random() < 0.5:
        part = part[:, ::-1]
    return Image.fromarray(part).resize((SIZE, SIZE), Image.Resampling.LANCZOS)


def names(rng: np.random.Generator, count: int) -> list[str]:
    """`count` different first names in random order."""
    return [NAMES[i] for i in rng.permutation(len(NAMES))[:count]]


def digit_card(rng: np.random.Generator, digit: int, split: str = "test") -> Image.Image:
    """A handwritten digit on a card, [112, 112] RGB, with random place, size, colours, blur and noise."""
    return glyph_card(rng, glyphs(split)[digit])


def print_card(rng: np.random.Generator, character: str, split: str = "test") -> Image.Image:
    """A printed character on a card, [112, 112] RGB, drawn like `digit_card`."""
    return glyph_card(rng, print_glyphs(split)[CHARACTERS.index(character)])


def glyph_card(rng: np.random.Generator, shapes: np.ndarray) -> Image.Image:
    """A random one of the glyphs, uint8 [n, height, width], on a card, [112, 112] RGB."""
    ground, ink = _colours(rng)
    side = int(rng.integers(58, 106))
    top, left = rng.integers(0, SIZE - side + 1, 2)
    _stamp(ground, shapes[rng.integers(len(shapes))], ink, int(top), int(left), side)
    return _camera(rng, ground)


@dataclass(frozen=True)
class ChartStyle:
    """The style that all columns of a chart share.

    ground, bar_colour, ink: RGB in 0..1. font: index of the font. bar: width of a bar in pixels. lines: distance of
    grid lines in units of the value, 0 for none.
    """

    ground: np.ndarray
    bar_colour: np.ndarray
    ink: np.ndarray
    font: int
    bar: int
    lines: int


def chart_style(rng: np.random.Generator, fonts: int = 8) -> ChartStyle:
    """A random style: light or dark ground, a bar that contrasts with it, labels in one of `fonts` fonts."""
    light = rng.random() < 0.7
    ground = np.full(3, rng.uniform(0.88, 1.0) if light else rng.uniform(0.0, 0.15))
    bar_colour = rng.uniform(0.1, 0.75, 3) if light else rng.uniform(0.35, 1.0, 3)
    ink = np.full(3, rng.uniform(0.0, 0.2) if light else rng.uniform(0.85, 1.0))
    return ChartStyle(
        ground, bar_colour, ink, int(rng.integers(fonts)), int(rng.integers(34, 91)), int(rng.integers(4))
    )


def chart_column(value: int, style: ChartStyle, shapes: np.ndarray) -> Image.Image:
    """One column of a bar chart, [112, 112] RGB: a bar on the axis, with its value (0 to 9) printed above it.

    shapes: printed glyphs, uint8 [characters, fonts, 48, 48], digits first. Columns of one style, side by side, form a
    chart; every column is a separate image, like the tiles of a wide image.
    """
    canvas = np.broadcast_to(style.ground, (SIZE, SIZE, 3)).copy()
    axis, unit = SIZE - 6, 4.5
    for step in range(style.lines, 10, style.lines) if style.lines else ():
        canvas[axis - round(unit * step)] += 0.15 * (style.ink - style.ground)
    height = round(unit * value) + 2
    left = (SIZE - style.bar) // 2
    canvas[axis - height : axis, left : left + style.bar] = style.bar_colour
    canvas[axis : axis + 2] = style.ink
    side = 66
    top = max(0, axis - height - side + 6)  # glyphs have an empty margin
    _stamp(canvas, shapes[value, style.font], style.ink, top, (SIZE - side) // 2, side)
    return _image(canvas)


def _stamp(canvas: np.ndarray, shape: np.ndarray, ink: np.ndarray, top: int, left: int, side: int) -> None:
    """Draws a glyph in ink on a square of the canvas."""
    cover = np.asarray(Image.fromarray(shape).resize((side, side), Image.Resampling.BICUBIC), float)[..., None] / 255
    box = canvas[top : top + side, left : left + side]
    box += cover * (ink - box)


def _image(canvas: np.ndarray) -> Image.Image:
    return Image.fromarray((canvas.clip(0, 1) * 255).round().astype(np.uint8))


def _camera(rng: np.random.Generator, canvas: np.ndarray) -> Image.Image:
    """Adds random blur and noise, as of a cheap camera."""
    card = _image(canvas)
    if rng.random() < 0.4:
        card = card.filter(ImageFilter.GaussianBlur(rng.uniform(0.3, 1.4)))
    if rng.random() < 0.4:
        noisy = np.asarray(card, float) + 255 * rng.normal(0, rng.uniform(0.01, 0.06), (SIZE, SIZE, 3))
        card = Image.fromarray(noisy.clip(0, 255).round().astype(np.uint8))
    return card


def _colours(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """A ground [112, 112, 3], plain or with a gradient, and an ink [3] of another lightness, in 0..1."""
    lightness = np.array([0.299, 0.587, 0.114])
    while True:
        ground, ink = rng.uniform(0, 1, 3), rng.uniform(0, 1, 3)
        if rng.random() < 0.3:
            ink = np.full(3, float(rng.integers(2)))
        if abs((ground - ink) @ lightness) > 0.4:
            break
    canvas = np.broadcast_to(ground, (SIZE, SIZE, 3)).copy()
    if rng.random() < 0.4:
        across, down = np.meshgrid(np.linspace(-1, 1, SIZE), np.linspace(-1, 1, SIZE))
        angle = rng.uniform(0, 2 * np.pi)
        canvas += (rng.uniform(0.02, 0.1) * (np.cos(angle) * across + np.sin(angle) * down))[..., None]
    return canvas, ink

"""Cards with a handwritten digit, drawn from glyphs that the embedded model's training never saw.

All randomness comes from the generator that is passed in.
"""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
from PIL import Image, ImageFilter

SIZE = 112  # pixels, both ways
SHEET = Path(__file__).parents[1] / "data" / "digits.png"
SPLITS = {"validation": slice(0, 50), "test": slice(50, 100)}
_NAMES = """
Alice Bob Carol David Emma Frank Grace Henry Ivan Julia Kevin Laura Mary Nancy Oliver Paul Rachel Sarah Tom Victor
Adam Anna Ben Daniel George Helen Jack James Jane John Lily Mark Martin Max Michael Peter Robert Sam Simon Thomas
"""
NAMES = _NAMES.split()


@functools.cache
def glyphs(split: str) -> np.ndarray:
    """uint8 [10 digits, 50, 20, 20] of a split, "validation" or "test"."""
    with Image.open(SHEET) as sheet:
        pixels = np.asarray(sheet.convert("L"))
    return pixels.reshape(10, 20, 100, 20).swapaxes(1, 2)[:, SPLITS[split]]


def names(rng: np.random.Generator, count: int) -> list[str]:
    """So many different first names."""
    return [NAMES[i] for i in rng.permutation(len(NAMES))[:count]]


def digit_card(rng: np.random.Generator, digit: int, split: str = "test") -> Image.Image:
    """One digit somewhere on a card, [112, 112] RGB: any size, colours that differ in lightness, blur and noise."""
    ground, ink = _colours(rng)
    side = int(rng.integers(58, 106))
    top, left = rng.integers(0, SIZE - side + 1, 2)
    shapes = glyphs(split)[digit]
    shape = Image.fromarray(shapes[rng.integers(len(shapes))]).resize((side, side), Image.Resampling.BICUBIC)
    cover = np.asarray(shape, float)[..., None] / 255
    box = ground[top : top + side, left : left + side]
    box += cover * (ink - box)
    card = Image.fromarray((ground.clip(0, 1) * 255).round().astype(np.uint8))
    if rng.random() < 0.4:
        card = card.filter(ImageFilter.GaussianBlur(rng.uniform(0.3, 1.4)))
    if rng.random() < 0.4:
        noisy = np.asarray(card, float) + 255 * rng.normal(0, rng.uniform(0.01, 0.06), (SIZE, SIZE, 3))
        card = Image.fromarray(noisy.clip(0, 255).round().astype(np.uint8))
    return card


def _colours(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """A ground [112, 112, 3], plain or shaded, and an ink [3] of another lightness, in 0..1."""
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

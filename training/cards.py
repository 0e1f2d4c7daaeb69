"""Render the training cards: handwritten digits, rendered words, captioned pictures. Every card is 112 x 112 RGB.

A card also has `cells`, an 8 x 8 map that says which part of the answer each image token shows (-1: ground only).
Only `align.py` reads it. All randomness comes from the generator that is passed in.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import cv2
import numpy as np
from PIL import Image, ImageDraw, ImageFont

from foveakv.evaluation.cards import CHARACTERS, TILE, chart_column, chart_style, glyph_card

SIZE, GRID = 112, 8
SPLITS = ("train", "validation", "test")

HERE = Path(__file__).parent
NAMES = (HERE / "names.txt").read_text(encoding="utf8").split()  # 40 first names
WORDS = (HERE / "words.txt").read_text(encoding="utf8").split()
"""Nouns of 3 to 6 letters, each one token of the text model with and without a space in front."""

FONT_SPLITS = {  # file name patterns; a font family is in one split only
    "train": ["DejaVuSans", "DejaVuSerif", "LiberationSans", "LiberationMono", "Cabin-", "ComicNeue-", "Comfortaa-"],
    "validation": ["Carlito-", "Courier Prime Sans"],
    "test": ["LiberationSerif", "Dosis-"],
}
FONT_SKIP = ("ExtraLight", "MathTeX", "Light", "Courier Prime Code")


@dataclass
class Card:
    """pixels: uint8 [112, 112, 3]. answer: the text on it. cells: int8 [8, 8], which part of the answer, or -1."""

    pixels: np.ndarray
    answer: str
    cells: np.ndarray


def digit_splits(sheet_png: Path) -> dict[str, np.ndarray]:
    """OpenCV's digits.png (50 rows of 100 glyphs, 500 per digit) -> uint8 [10, n, 20, 20] per split: 400 / 50 / 50."""
    sheet = cv2.imread(str(sheet_png), cv2.IMREAD_GRAYSCALE)
    glyphs = sheet.reshape(50, 20, 100, 20).swapaxes(1, 2).reshape(10, 500, 20, 20)
    return dict(zip(SPLITS, np.split(glyphs, [400, 450], axis=1), strict=True))


def ground_and_ink(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """A background [112, 112, 3], plain or shaded, and an ink colour [3] with contrast to it (floats in 0..1)."""
    while True:
        ground, ink = rng.uniform(0, 1, 3), rng.uniform(0, 1, 3)
        if rng.random() < 0.3:  # black or white ink, or a grey ground, are common in print
            ink = np.full(3, float(rng.integers(2)))
        if rng.random() < 0.3:
            ground = np.full(3, rng.choice([rng.uniform(0, 0.25), rng.uniform(0.75, 1)]))
        if abs((ground - ink) @ (0.299, 0.587, 0.114)) > 0.4:
            break
    canvas = np.broadcast_to(ground, (SIZE, SIZE, 3)).copy()
    if rng.random() < 0.4:
        y, x = np.mgrid[-1 : 1 : SIZE * 1j, -1 : 1 : SIZE * 1j]
        angle = rng.uniform(0, 2 * np.pi)
        canvas += (rng.uniform(0.02, 0.1) * (np.cos(angle) * x + np.sin(angle) * y))[..., None]
    return canvas, ink


def finish(rng: np.random.Generator, canvas: np.ndarray, blur: float = 0.9) -> np.ndarray:
    """Add blur and noise like a cheap camera; convert to uint8."""
    if rng.random() < 0.4:
        canvas = cv2.GaussianBlur(canvas, (0, 0), rng.uniform(0.3, blur))
    if rng.random() < 0.4:
        canvas = canvas + rng.normal(0, rng.uniform(0.01, 0.06), canvas.shape)
    return (canvas.clip(0, 1) * 255).round().astype(np.uint8)


def mark(cells: np.ndarray, value: int, top: float, left: float, bottom: float, right: float) -> None:
    """Set the cells whose centre is inside the box (in pixels) to `value`."""
    centre = (np.arange(GRID) + 0.5) * SIZE / GRID
    cells[np.ix_((centre >= top) & (centre < bottom), (centre >= left) & (centre < right))] = value


def warped(rng: np.random.Generator, glyph: np.ndarray) -> np.ndarray:
    """Imitate other handwriting: a glyph (uint8 [20, 20]) turned, slanted, stretched, bent, thicker or thinner."""
    size = 80  # warped enlarged, so that thin strokes survive
    y, x = np.mgrid[-1 : 1 : size * 1j, -1 : 1 : size * 1j]
    angle, slant = rng.normal(0, 0.12), rng.normal(0, 0.12)
    wide, high = np.exp(rng.normal(0, 0.08, 2))
    across = (np.cos(angle) * x + np.sin(angle) * y) * wide + slant * y
    down = (np.cos(angle) * y - np.sin(angle) * x) * high
    for field in (across, down):  # a smooth random bend
        field += cv2.resize(rng.normal(0, 0.05, (4, 4)), (size, size), interpolation=cv2.INTER_CUBIC)
    big = cv2.resize(glyph, (size, size), interpolation=cv2.INTER_CUBIC)
    to_pixels = [((field + 1) * (size - 1) / 2).astype(np.float32) for field in (across, down)]
    big = cv2.remap(big, *to_pixels, cv2.INTER_LINEAR)
    if (stroke := int(rng.integers(-4, 6))) > 0:
        big = cv2.dilate(big, cv2.getStructuringElement(cv2.MORPH_ELLIPSE, (stroke, stroke)))
    elif stroke < -1:
        big = cv2.erode(big, cv2.getStructuringElement(cv2.MORPH_ELLIPSE, (-stroke, -stroke)))
    return cv2.resize(big, glyph.shape, interpolation=cv2.INTER_AREA)


def digits_card(rng: np.random.Generator, glyphs: np.ndarray, length: int, warp: float = 0.0) -> Card:
    """`length` (1, 2 or 3) handwritten digits in a row. glyphs: uint8 [10, n, 20, 20]; warp: share that is warped."""
    canvas, ink = ground_and_ink(rng)
    low, high = {1: (58, 106), 2: (46, 60), 3: (33, 41)}[length]
    side, values, cells = (
        int(rng.integers(low, high)),
        rng.integers(10, size=length),
        np.full((GRID, GRID), -1, np.int8),
    )
    step = int(side * (1 if length == 1 else rng.uniform(0.86, 0.94)))  # glyphs have an empty rim
    width = step * (length - 1) + side
    top, left = int(rng.integers(0, SIZE - side + 1)), int(rng.integers(0, max(1, SIZE - width + 1)))
    for i, value in enumerate(values):
        glyph = glyphs[value, rng.integers(glyphs.shape[1])]
        if warp and rng.random() < warp:
            glyph = warped(rng, glyph)
        cover = (
            cv2.resize(glyph, (side, side), interpolation=cv2.INTER_CUBIC).astype(float).clip(0, 255)[..., None] / 255
        )
        x = min(left + i * step, SIZE - side)
        box = canvas[top : top + side, x : x + side]
        box += cover * (ink - box)
        mark(cells, i, top + 0.1 * side, x + 0.1 * side, top + 0.9 * side, x + 0.9 * side)
    return Card(finish(rng, canvas, 1.4 if length == 1 else 0.9), "".join(map(str, values)), cells)


def fonts(roots: list[Path], split: str) -> list[Path]:
    """Font files of a split below the given folders."""
    files = sorted(f for root in roots for f in root.rglob("*.[to]tf"))
    files = [f for f in files if not any(s in f.name for s in FONT_SKIP)]
    return [f for f in files if any(f.name.startswith(p) for p in FONT_SPLITS[split])]


def word_card(rng: np.random.Generator, word: str, font_files: list[Path]) -> Card:
    """A printed word, lower case or (one in four) capitals; the answer is always lower case."""
    canvas, ink = ground_and_ink(rng)
    text, file = (word.upper() if rng.random() < 0.25 else word), str(font_files[rng.integers(len(font_files))])
    width = ImageFont.truetype(file, 100).getlength(text)
    font = ImageFont.truetype(file, min(64, 100 * rng.uniform(78, 108) / width))
    left, top, right, bottom = font.getbbox(text)
    x, y = rng.uniform(1, max(1.5, SIZE - (right - left) - 1)), rng.uniform(2, SIZE - (bottom - top) - 2)
    mask = Image.new("L", (SIZE, SIZE))
    ImageDraw.Draw(mask).text((x - left, y - top), text, fill=255, font=font)
    canvas += (np.asarray(mask, float)[..., None] / 255) * (ink - canvas)
    cells = np.full((GRID, GRID), -1, np.int8)
    mark(cells, 0, y - 4, x - 2, y + bottom - top + 4, x + right - left + 2)
    return Card(finish(rng, canvas, 0.7), word, cells)


def print_tiles(font_files: list[Path]) -> np.ndarray:
    """uint8 [34 characters, fonts, 48, 48]: capitals and digits of one height, each in the middle of its tile."""
    tiles = np.zeros((len(CHARACTERS), len(font_files), TILE, TILE), np.uint8)
    for number, file in enumerate(font_files):
        box = ImageFont.truetype(str(file), 100).getbbox("H")
        font = ImageFont.truetype(str(file), 100 * 0.68 * TILE / (box[3] - box[1]))
        for row, character in enumerate(CHARACTERS):
            left, top, right, bottom = font.getbbox(character)
            tile = Image.new("L", (TILE, TILE))
            place = ((TILE - right - left) / 2, (TILE - bottom - top) / 2)
            ImageDraw.Draw(tile).text(place, character, fill=255, font=font)
            tiles[row, number] = np.asarray(tile)
    return tiles


def print_card(rng: np.random.Generator, tiles: np.ndarray) -> Card:
    """A printed character, half of the time a digit. No cells: the background is not marked."""
    place = int(rng.integers(10 if rng.random() < 0.5 else len(CHARACTERS)))
    return Card(np.asarray(glyph_card(rng, tiles[place])), CHARACTERS[place], np.full((GRID, GRID), -1, np.int8))


def chart_card(rng: np.random.Generator, tiles: np.ndarray) -> Card:
    """A column of a bar chart. No cells."""
    value = int(rng.integers(10))
    column = chart_column(value, chart_style(rng, tiles.shape[1]), tiles)
    return Card(np.asarray(column), str(value), np.full((GRID, GRID), -1, np.int8))


def captioned(root: Path) -> dict[str, list[Path]]:
    """Tux Paint's stamps: caption of one or two plain words -> pictures. Letters, signs and money are left out."""
    found: dict[str, list[Path]] = {}
    for file in sorted(root.rglob("*.png")):
        text = file.with_suffix(".txt")
        if file.relative_to(root).parts[0] in ("symbols", "town") or not text.exists():
            continue
        line = re.split(r"[.!,(\u2014\u2013:?]", text.read_text(encoding="utf8").splitlines()[0])[0].strip().lower()
        line = re.sub(r"^(an?|the|some|another|our|big|two|happy|colorful)\s+", "", line)
        if re.fullmatch(r"[a-z]{3,}( [a-z]{3,})?", line) and line not in ("boom", "ripe"):
            found.setdefault(line, []).append(file)
    return found


def picture_card(rng: np.random.Generator, caption: str, picture: Image.Image) -> Card:
    """A cut-out picture (RGBA) on a random background: turned, scaled, mirrored, with changed light."""
    canvas, _ = ground_and_ink(rng)
    if rng.random() < 0.5:
        picture = picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    picture = picture.rotate(rng.uniform(-12, 12), Image.Resampling.BICUBIC, expand=True)
    picture = picture.crop(picture.getbbox())
    scale = SIZE * rng.uniform(0.7, 1.0) / max(picture.size)
    size = (max(8, round(picture.width * scale)), max(8, round(picture.height * scale)))
    array = np.asarray(picture.resize(size, Image.Resampling.LANCZOS), float) / 255
    colour = ((array[..., :3] - 0.5) * rng.uniform(0.8, 1.15) + 0.5 + rng.uniform(-0.08, 0.08)).clip(0, 1)
    y, x = int(rng.integers(0, SIZE - size[1] + 1)), int(rng.integers(0, SIZE - size[0] + 1))
    box = canvas[y : y + size[1], x : x + size[0]]
    box += array[..., 3:] * (colour - box)
    cover = np.zeros((SIZE, SIZE), np.float32)
    cover[y : y + size[1], x : x + size[0]] = array[..., 3]
    cells = np.where(cv2.resize(cover, (GRID, GRID), interpolation=cv2.INTER_AREA) > 0.3, 0, -1).astype(np.int8)
    return Card(finish(rng, canvas), caption, cells)


def load_picture(file: Path) -> Image.Image:
    """Read as RGBA, cropped to the opaque part, at most 256 px."""
    picture = Image.open(file).convert("RGBA")
    picture = picture.crop(picture.getbbox())
    picture.thumbnail((256, 256))
    return picture


def makers(sources: Path, split: str) -> dict[str, Callable[[np.random.Generator], Card]]:
    """Card makers by kind for a split. sources: a folder with the unpacked Debian packages (see README.md)."""
    share = sources / "usr/share"
    glyphs = digit_splits(share / "doc/opencv-doc/examples/data/digits.png")[split]
    font_files = fonts([share / "fonts"], split)
    tiles = print_tiles(font_files)
    pictures = captioned(share / "tuxpaint/stamps")
    captions, images = sorted(pictures), {f: load_picture(f) for files in pictures.values() for f in files}

    def picture(rng: np.random.Generator) -> Card:
        caption = captions[rng.integers(len(captions))]
        files = pictures[caption]
        return picture_card(rng, caption, images[files[rng.integers(len(files))]])

    warp = 0.7 if split == "train" else 0.0  # 400 glyphs of a digit are few
    return {
        "digit": lambda rng: digits_card(rng, glyphs, 1, warp),
        "number": lambda rng: digits_card(rng, glyphs, int(rng.integers(2, 4)), warp),
        "word": lambda rng: word_card(rng, WORDS[rng.integers(len(WORDS))], font_files),
        "picture": picture,
        "print": lambda rng: print_card(rng, tiles),
        "chart": lambda rng: chart_card(rng, tiles),
    }

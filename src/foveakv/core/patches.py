"""Mapping from prompt columns to images and their patches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from foveakv.core.prompt import IMAGE, PromptMap
from foveakv.errors import InputError

if TYPE_CHECKING:
    from PIL.Image import Image


def image_columns(prompt: PromptMap, images: Sequence[Image], sequence: int = 0) -> list[Tensor]:
    """Return the prompt columns of every image, in order.

    If the prompt map cannot distinguish the images, or has them in pieces, the image columns are split evenly.

    Raises:
        InputError: the image columns cannot be assigned to the images.
    """
    columns = torch.nonzero(prompt.kinds[sequence] == IMAGE).flatten()
    numbers = prompt.index[sequence][columns]
    known, count = numbers.unique(), len(images)
    if len(known) == count:
        return [columns[numbers == number] for number in known]
    if count == 0 or len(columns) % count:
        raise InputError(
            f"{len(columns)} image tokens do not divide among {count} images; give images of the same size"
        )
    if len(known) > count and len({image.size for image in images}) > 1:
        raise InputError(
            f"the model splits images into pieces: the prompt has {len(known)} pieces of {count} images of different "
            "sizes, and it cannot be determined which belong together; give images of the same size"
        )
    return list(columns.chunk(count))


def patch_grid(tokens: int, size: tuple[int, int]) -> tuple[int, int] | None:
    """Return the rows and columns of an image's tokens: a grid of its shape, else a square; None if neither fits.

    size: (width, height) of the image.
    """
    width, height = size
    fits = [(tokens // columns, columns) for columns in range(1, tokens + 1) if tokens % columns == 0]
    rows, columns = min(fits, key=lambda grid: abs(math.log(grid[1] / grid[0]) - math.log(width / height)))
    if abs(math.log(columns / rows) - math.log(width / height)) < 0.15:
        return rows, columns
    side = math.isqrt(tokens)
    return (side, side) if side * side == tokens else None

"""Which prompt columns are a picture, and which of its patches each one is."""

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
    """The prompt columns of every image, in order.

    Images that the prompt map cannot tell apart, or that it knows in pieces, share the image columns evenly.

    Raises:
        InputError: the image columns cannot be shared out among these images.
    """
    columns = torch.nonzero(prompt.kinds[sequence] == IMAGE).flatten()
    numbers = prompt.index[sequence][columns]
    known, count = numbers.unique(), len(images)
    if len(known) == count:
        return [columns[numbers == number] for number in known]
    if count == 0 or len(columns) % count:
        raise InputError(f"{len(columns)} image tokens do not divide among {count} images; give pictures of one size")
    if len(known) > count and len({image.size for image in images}) > 1:
        raise InputError(
            f"the model breaks up its images: the prompt holds {len(known)} pieces of {count} images of different "
            "sizes, and which belong together cannot be told; give pictures of one size"
        )
    return list(columns.chunk(count))


def patch_grid(tokens: int, size: tuple[int, int]) -> tuple[int, int] | None:
    """Rows and columns of an image's tokens: those with the picture's shape, else a square; None where neither fits.

    size: the picture's (width, height).
    """
    width, height = size
    fits = [(tokens // columns, columns) for columns in range(1, tokens + 1) if tokens % columns == 0]
    rows, columns = min(fits, key=lambda grid: abs(math.log(grid[1] / grid[0]) - math.log(width / height)))
    if abs(math.log(columns / rows) - math.log(width / height)) < 0.15:
        return rows, columns
    side = math.isqrt(tokens)
    return (side, side) if side * side == tokens else None

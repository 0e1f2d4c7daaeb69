"""Which patches of the images are stored, for the page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from foveakv.core.columns import held_share
from foveakv.core.patches import image_columns, patch_grid
from foveakv.errors import InputError

if TYPE_CHECKING:
    from foveakv.engines.transformers.cache import CompressedCache


@dataclass(frozen=True)
class _Sized:
    """Stands for an image, of which the size alone is needed."""

    size: tuple[int, int]


@dataclass(frozen=True)
class Kept:
    """Shares of KV heads that store each patch.

    grids: (rows, columns) of each image's patches; None where they form no grid. shares: for each image, over all
    layers. layers: the same for each compressed layer; empty unless asked for.
    """

    grids: list[tuple[int, int] | None]
    shares: list[list[float]]
    layers: list[list[list[float]]]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {"grids": self.grids, "shares": self.shares, "layers": self.layers}


def kept_patches(cache: CompressedCache, sizes: Sequence[tuple[int, int]], layers: bool = False) -> Kept | None:
    """Return the patches that a cache stores.

    cache: of one sequence. sizes: (width, height) of the prompt's images. None: the image tokens of this model cannot
    be assigned to its images.
    """
    images: list[Any] = [_Sized(size) for size in sizes]
    prompt = cache.full_prompt.to("cpu")
    try:
        columns = image_columns(prompt, images) if images else []
    except InputError:
        return None
    held = [cache.kept(layer.layer_idx)[0].cpu() for layer in cache.compressed]
    total, _ = held_share(held, cache.prompt_columns)
    each = [held_share([own], cache.prompt_columns)[0] for own in held] if layers else []
    grids = [patch_grid(len(own), image.size) for own, image in zip(columns, images, strict=True)]
    return Kept(grids, _per_image(total, columns), [_per_image(share, columns) for share in each])


def _per_image(share: Tensor, columns: Sequence[Tensor]) -> list[list[float]]:
    return [[round(value, 4) for value in share[own].tolist()] for own in columns]

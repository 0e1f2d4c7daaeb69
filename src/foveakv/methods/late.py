"""For methods that decide once all layers are read: everything stays at prefill, `after_prefill` drops the rest."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from foveakv.errors import CacheInUseError

if TYPE_CHECKING:
    from foveakv.engines.transformers.cache import CompressedLayer


def keep_columns(layer: CompressedLayer, keep: Tensor) -> None:
    """Drops the slots of a layer whose prompt column is not marked in keep, bool [B, H, C] or [B, 1, C].

    Only right after the prompt, where a slot's position is its column.
    """
    segments = layer.segments
    if segments is None:
        raise CacheInUseError("the prompt has not been processed")
    positions = segments.positions()  # [B, H, M], -1 behind a run's end
    segments.keep(keep.expand(-1, segments.heads, -1).gather(2, positions.clamp_min(0)) & (positions >= 0))

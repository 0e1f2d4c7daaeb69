"""What a method sees of the slots that a layer stores: `foveakv.methods.views.Slots` over `Segments`."""

from __future__ import annotations

import torch
from torch import Tensor

from foveakv.kernels import cpu_scores
from foveakv.memory.segments import Segments


class StoredSlots:
    """A view of one layer's segments during a decode step; the protocol documents each method."""

    __slots__ = ("_segments",)

    def __init__(self, segments: Segments) -> None:
        self._segments = segments

    @property
    def batch(self) -> int:
        return self._segments.batch

    @property
    def heads(self) -> int:
        return self._segments.heads

    @property
    def max_length(self) -> int:
        return self._segments.max_length

    @property
    def lengths(self) -> Tensor:
        return self._segments.lengths

    @property
    def sequence_lengths(self) -> list[int]:
        return self._segments.sequence_lengths

    @property
    def device(self) -> torch.device:
        return self._segments.device

    @property
    def uniform(self) -> bool:
        return self._segments.runs.uniform

    def positions(self) -> Tensor:
        return self._segments.view_positions()

    def valid(self) -> Tensor:
        return self._segments.valid()

    def keys(self) -> Tensor:
        return self._segments.gather()[0]

    def field(self, name: str) -> Tensor:
        return self._segments.view(name)

    def add(self, name: str, amounts: Tensor) -> None:
        self._segments.add(name, amounts)

    def put(self, name: str, slots: Tensor, counts: list[int], value: float) -> None:
        self._segments.put(name, slots, counts, value)

    def set_field(self, name: str, padded: Tensor) -> None:
        self._segments.set_field(name, padded)

    def add_and_find(
        self,
        name: str,
        amounts: Tensor,
        low: list[int],
        high: list[int],
        *,
        per_head: bool,
        by_position: bool,
        mark: str | None = None,
    ) -> Tensor | None:
        segments = self._segments
        if not cpu_scores.usable(segments.flat(name), amounts):
            return None
        return cpu_scores.add_and_find(
            segments.runs, segments.flat(name), amounts, low, high, per_head=per_head, by_position=by_position,
            marked=None if mark is None else segments.flat(mark),
        )  # fmt: skip

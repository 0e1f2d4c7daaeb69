"""Decode eviction on attention that a test makes up: one layer's slots and a recycle bin, without a model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from foveakv.memory.segments import Segments
from foveakv.methods.base import Counts, DecodeView, Drop
from foveakv.methods.ddes import RecycleBin


class Simulation:
    """A layer whose prompt columns start with `scores` [B, H, C]; keys and values carry the slot's position."""

    def __init__(
        self, rules: RecycleBin, scores: Tensor, steady: int | list[int], recent: int = 0, keep: Any = None
    ) -> None:
        batch, heads, columns = scores.shape
        self.rules = rules
        self.counts = Counts()
        self.state: dict[str, Any] = {}
        self.seen = columns
        keep = torch.ones(batch, heads, columns, dtype=torch.bool) if keep is None else keep
        sizes = torch.tensor([steady] * batch if isinstance(steady, int) else steady)
        rules.note(self.state, scores, keep, sizes, torch.full((batch,), recent))
        positions = torch.arange(columns).expand(batch, columns)
        self.segments = Segments.from_dense(*self._kv(positions, heads), keep, positions)
        layer = SimpleNamespace(segments=self.segments, state=self.state)
        self.cache: Any = SimpleNamespace(compressed=[layer], method=SimpleNamespace(name="simulated"), state={})
        rules.open(self.cache)

    @staticmethod
    def _kv(positions: Tensor, heads: int) -> tuple[Tensor, Tensor]:
        kv = positions[:, None, :, None].float().expand(-1, heads, -1, 2)
        return kv, kv

    def step(self, attention: Tensor | list[float], new: int = 1) -> list[int]:
        """Adds `new` tokens, then `attention` [..., T] by logical position (T >= seen); returns what left of run 0."""
        segments, batch = self.segments, self.segments.batch
        positions = torch.arange(self.seen, self.seen + new).expand(batch, new)
        segments.append(*self._kv(positions, segments.heads), positions)
        self.seen += new
        stored = segments.positions()
        attention = torch.as_tensor(attention, dtype=torch.float32)
        attention = attention.expand(batch, segments.heads, attention.shape[-1])
        attention_sum = attention.gather(-1, stored.clamp_min(0)).masked_fill(stored < 0, 0)
        view = DecodeView(
            0, 0, torch.zeros(0), 1.0, self.cache, self.state, self.counts, segments, self.seen, attention_sum
        )
        leaving = self.rules.step(view)
        before = set(self.kept())
        if isinstance(leaving, Drop):
            segments.evict(leaving.slots, leaving.counts)
        elif leaving is not None:
            segments.keep(leaving)
        return sorted(before - set(self.kept()))

    def kept(self, sequence: int = 0, head: int = 0) -> list[int]:
        positions = self.segments.positions()[sequence, head]
        return sorted(positions[positions >= 0].tolist())

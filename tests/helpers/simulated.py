"""Decode eviction on attention that a test makes up: one layer's slots and a recycle bin, without a model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from foveakv.core.budget import Geometry
from foveakv.core.prompt import TEXT, PromptMap
from foveakv.engines.transformers.counts import Counts
from foveakv.engines.transformers.decisions import Storage, evict, store_prompt
from foveakv.engines.transformers.slots import StoredSlots
from foveakv.methods.ddes import BinLayer, BinState, RecycleBin
from foveakv.methods.views import Decision, DecodeView, PrefillView, PromptView


class Simulation:
    """A layer whose prompt columns start with `scores` [B, H, C]; keys and values carry the slot's position."""

    def __init__(
        self, rules: RecycleBin, scores: Tensor, steady: int | list[int], recent: int = 0, keep: Any = None
    ) -> None:
        batch, heads, columns = scores.shape
        self.rules, self.counts, self.state, self.seen = rules, Counts(), BinState(), columns
        sizes = torch.tensor([steady] * batch if isinstance(steady, int) else steady)
        self.state.add_layer(sizes, torch.full((batch,), recent))
        positions = torch.arange(columns).expand(batch, columns)
        prompt = PromptMap(torch.full((batch, columns), TEXT, dtype=torch.int8))
        self.request = PromptView(prompt, Geometry(batch, [columns] * batch, 1, heads, 2, 2, 4), (0,), 1)
        keys, values = self._kv(positions, heads)
        view = PrefillView(0, 0, keys, 1.0, self.request, self.state, keys, values, positions, prompt, None)
        decision = Decision(keep=keep, fields=rules.fields(scores))
        self.segments, _ = store_prompt(view, decision, Storage("simulated", "auto", None, 0))

    @property
    def layer(self) -> BinLayer:
        """The bin of the layer."""
        return self.state.layers[0]

    @staticmethod
    def _kv(positions: Tensor, heads: int) -> tuple[Tensor, Tensor]:
        kv = positions[:, None, :, None].float().expand(-1, heads, -1, 2)
        return kv, kv

    def step(self, attention: Tensor | list[float], new: int = 1) -> list[int]:
        """Adds `new` tokens, then `attention` [..., T] by position (T >= seen); returns what left the first head."""
        segments, batch = self.segments, self.segments.batch
        positions = torch.arange(self.seen, self.seen + new).expand(batch, new)
        segments.append(*self._kv(positions, segments.heads), positions)
        self.seen += new
        stored = segments.positions()
        attention = torch.as_tensor(attention, dtype=torch.float32)
        attention = attention.expand(batch, segments.heads, attention.shape[-1])
        attention_sum = attention.gather(-1, stored.clamp_min(0)).masked_fill(stored < 0, 0)
        view = DecodeView(
            0, 0, torch.zeros(0), 1.0, self.request, self.state, StoredSlots(segments), self.seen, attention_sum
        )
        decision = self.rules.step(view, self.state)
        before = set(self.kept())
        if decision is not None:
            evict(segments, decision, "simulated")
            self.counts.restored += decision.restored
            self.counts.flushes += decision.flushes
        return sorted(before - set(self.kept()))

    def kept(self, sequence: int = 0, head: int = 0) -> list[int]:
        """Positions that a head stores, ascending."""
        positions = self.segments.positions()[sequence, head]
        return sorted(positions[positions >= 0].tolist())

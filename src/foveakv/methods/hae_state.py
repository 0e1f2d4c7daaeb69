"""Per-request state of HAE."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from foveakv.methods.dap import TextStats
from foveakv.methods.ddes import BinState
from foveakv.methods.shared_bin import SharedState
from foveakv.methods.views import State

RECENT, RECENT_SHARE = 4, 4  # default `recent`: at most a quarter of l


@dataclass
class Sizes(State):
    """Sizes of DDES for one set of prompt tokens, int64 [B] on the CPU.

    steady: l. recent: newest tokens that are protected. stored: tokens of the prompt that are stored. longer: whether
    the prompt exceeds the steady size in some sequence.
    """

    steady: Tensor
    recent: Tensor
    stored: Tensor
    longer: bool

    @classmethod
    def of(cls, lengths: Tensor, budget: Tensor | None, recent: int | None, sink: int, *, shrink: bool) -> Sizes:
        """Create them for prompts of `lengths` tokens after DAP.

        budget: l; None = the lengths. recent: None = `RECENT`, at most a quarter of l. shrink: whether longer prompts
        are reduced to l.
        """
        steady = lengths if budget is None else budget if shrink else torch.maximum(budget, lengths)
        steady = steady.clamp_min(max(sink + (recent or 0), 1))
        return cls(
            steady, newest_kept(steady, recent, sink), torch.minimum(lengths, steady), bool((lengths > steady).any())
        )


def newest_kept(steady: Tensor, recent: int | None, sink: int) -> Tensor:
    """Return the number of newest tokens that are never evicted, like `steady` int64 [B]; see `Sizes.of`."""
    if recent is None:
        return ((steady - sink) // RECENT_SHARE).clamp(0, RECENT)
    return torch.full_like(steady, recent)


@dataclass
class HAEState(State):
    """State of one request.

    keep: bool [B, C], columns that the deciding layer and all later ones keep. sizes: for DDES, once decided. first:
    bool [B, C], what early layers keep by layer 0. stats: sums of the scoring layers' statistics so far, [B, C] each.
    sums: prompt scores: of every waiting layer, [B, H, C] each, or with shared scores their sum [B, C]. bins, shared:
    the recycle bins, see `RecycleBin` and `shared_bin`. figures: plain values for the report.
    """

    keep: Tensor
    sizes: Sizes | None = None
    first: Tensor | None = None
    stats: list[Tensor] = field(default_factory=list)
    sums: list[Tensor] = field(default_factory=list)
    bins: BinState = field(default_factory=BinState)
    shared: SharedState | None = None
    figures: dict[str, Any] = field(default_factory=dict)

    def add_stats(self, stats: TextStats) -> None:
        """Add the statistics of a scoring layer."""
        self.stats = [old + new for old, new in zip(self.stats, stats, strict=True)] if self.stats else list(stats)

    def add_shared_sums(self, sums: Tensor) -> None:
        """Add prompt scores [B, H, C] of a scoring layer, summed over heads."""
        pooled = sums.sum(1)
        self.sums = [self.sums[0] + pooled] if self.sums else [pooled]

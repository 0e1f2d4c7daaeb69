"""Per-request state of HAE."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from foveakv.methods.contexts import before_text, still_open
from foveakv.methods.dap import TextStats
from foveakv.methods.ddes import BinState
from foveakv.methods.shared_bin import SharedState
from foveakv.methods.views import PromptView, State

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
class Waiting(State):
    """A layer that waits for the deciding one. sums: its prompt scores [B, H, C]. candidates: bool [B, 1 or H, C].
    positions: int64 [B, C].
    """

    sums: Tensor
    candidates: Tensor
    positions: Tensor


@dataclass
class HAEState(State):
    """State of one request.

    Masks over the N columns of the context are bool [B, N]. keep: what the deciding layer and all later ones keep.
    ranked: visual columns that a text token of the newest block comes after. judge: those of them that DAP has not
    judged before. open: visual columns that wait for text. sizes: for DDES, once decided. first: what early layers keep
    by layer 0. stats: sums of the scoring layers' statistics so far, [B, N] each. waiting: the layers before the
    deciding one. sums: with shared scores, the sum of the scoring layers' prompt scores, [B, C]. bins, shared: the
    recycle bins, see `RecycleBin` and `shared_bin`. figures: plain values for the report.
    """

    keep: Tensor
    ranked: Tensor
    judge: Tensor
    open: Tensor
    sizes: Sizes | None = None
    first: Tensor | None = None
    stats: list[Tensor] = field(default_factory=list)
    waiting: list[Waiting] = field(default_factory=list)
    sums: Tensor | None = None
    bins: BinState = field(default_factory=BinState)
    shared: SharedState | None = None
    figures: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, request: PromptView, before: HAEState | None = None) -> HAEState:
        """Create it for a prompt, or for a further block with the state before it."""
        prompt = request.prompt
        ranked = before_text(prompt, request.block_start)
        waiting = prompt.visual if before is None else still_open(before.open, prompt)
        made = cls(prompt.real, ranked, waiting & ranked, waiting & ~ranked)
        if before is not None:
            made.bins, made.shared, made.figures = before.bins.emptied(), before.shared, before.figures
        return made

    def add_stats(self, stats: TextStats) -> None:
        """Add the statistics of a scoring layer."""
        self.stats = [old + new for old, new in zip(self.stats, stats, strict=True)] if self.stats else list(stats)

    def add_shared_sums(self, sums: Tensor) -> None:
        """Add prompt scores [B, H, C] of a scoring layer, summed over heads."""
        pooled = sums.sum(1)
        self.sums = pooled if self.sums is None else self.sums + pooled

    def count(self, figure: str, counts: list[int]) -> None:
        """Add counts per sequence to a figure of the report."""
        before = self.figures.get(figure, ())
        if len(before) == len(counts):  # else sequences were selected since, and their counts are not known
            counts = [a + b for a, b in zip(before, counts, strict=True)]
        self.figures[figure] = counts

"""Per-request state of HybridKV."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from foveakv.methods.hybridkv_budgets import Digest
from foveakv.methods.results import HeadMaps
from foveakv.methods.views import State


@dataclass
class HybridKVState(State):
    """State of one request.

    rows: text rows int64 [B, n], and bool [B, n], which of them count. k: of every sequence, for Eq. 3. window: rows of
    the window, int64 [B]. text: text tokens, and those of the window besides, int64 [B]. digest, chunk: how digests are
    stored, and tokens per chunk. totals: slots of the budget, int64 [B]. most: dynamic heads whose digests the budget
    allows, int64 [B]. refused: heads that are static because of it, int64 [B]. known: in a further block, the static
    heads, bool [B, L, H] on the CPU. Per layer, during prefill: scores S [B, H], static [B, H], window_scores [B, H, C]
    of static heads, columns: what heads may keep, bool [B, 1 or H, C], and text, bool [B, C]. After prefill: heads,
    offloaded: chunks of every head in its store, int64 [B, L, H] on the CPU, starved: heads that read none of theirs,
    bool [B, L, H], rho float64 [B], and int64 [B] slots of the budget minus digests (total) and before rounding and
    trimming (nominal).
    """

    rows: tuple[Tensor, Tensor]
    k: list[int]
    window: Tensor
    text: Tensor
    digest: Digest
    chunk: int
    totals: Tensor
    most: Tensor
    refused: Tensor
    known: Tensor | None = None
    scores: list[Tensor] = field(default_factory=list)
    static: list[Tensor] = field(default_factory=list)
    window_scores: list[Tensor | None] = field(default_factory=list)
    columns: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    offloaded: Tensor | None = None
    starved: Tensor | None = None
    heads: HeadMaps | None = None
    rho: Tensor | None = None
    total: Tensor | None = None
    nominal: Tensor | None = None

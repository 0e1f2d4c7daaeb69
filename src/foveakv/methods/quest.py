"""Quest: query-aware page selection without eviction (Tang et al., arXiv 2406.10774)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from foveakv.core.budget import parse_budget
from foveakv.core.columns import from_end
from foveakv.methods.base import Method
from foveakv.methods.checks import whole_number
from foveakv.methods.presets import Presets
from foveakv.methods.results import Results
from foveakv.methods.views import Decision, Further, Offload, PrefillView, PromptView, ResultView, When
from foveakv.methods.windows import Auto

PAPER_PAGE = 16
PAGES = (16, 8, 4)
"""Sizes of automatic pages."""
PAGES_READ = 32
"""Pages that the budget holds if automatic pages are larger than the smallest."""


@dataclass
class Quest(Presets, Method):
    """Keep all keys and values on the device and attend in every step to the most critical pages of the prompt.

    The prompt is split into pages (of 16 tokens in the paper), with the minimum and maximum of every key channel. The
    criticality of a page is an upper bound of q . k for its keys: the sum over channels of max(q * min, q * max). The
    budget / page_size pages with the highest criticality are attended to in full (Sec. 3, Alg. 1). The first two layers
    attend to
    everything. This reduces reads, not memory.

    Not stated in the paper; we
    - select one set of pages for all query heads of a KV head (and all tokens of a later turn), by the maximum of each
      one's softmax over pages, which for a single query is the paper's order;
    - count the incomplete last page towards the budget and always attend to it;
    - always select at least one page;
    - attend to all decoded tokens, in addition to the budget.

    Args:
        budget: prompt tokens per KV head that a step attends to, in every layer after the first `full_layers`; a budget
            in bytes stands for the number of tokens that this memory would hold.
        page_size: tokens per page. "auto" (not in the paper): the largest of 16, 8 and 4 of which the budget holds 32,
            otherwise 4. A batch has one size: that of the sequence with the smallest budget.
        full_layers: number of first layers that attend to everything, in addition to the budget.
    """

    budget: float | int | str = 0.2
    page_size: int | Auto = "auto"
    full_layers: int = 2

    name: ClassVar[str] = "quest"
    presets: ClassVar[dict[str, dict[str, Any]]] = {"paper": {"page_size": PAPER_PAGE, "full_layers": 2}}

    def __post_init__(self) -> None:
        parse_budget(self.budget)
        if self.page_size != "auto":
            whole_number(self.name, "page_size", self.page_size, 1, 'tokens per page; or "auto"')
        whole_number(self.name, "full_layers", self.full_layers, 0, "first layers that attend to everything")

    @property
    def decides(self) -> tuple[When, ...]:
        """Builds pages at the end of the prompt and selects among them in every step."""
        return "prefill", "read"

    @property
    def further(self) -> Further:
        """Later tokens are kept and attended to in full: pages are those of the first prompt."""
        return "keep"

    def prefill(self, view: PrefillView) -> Decision | None:
        """Split one layer's prompt into pages, with the bounds of their keys as digests."""
        if view.compressed_idx < self.full_layers:
            return None
        prompt, size = view.prompt, self._page(view.request)
        pages = self._chosen_pages(view.request, size)
        chooses = pages < prompt.lengths // size  # [B]
        if not bool(chooses.any()):
            return None
        incomplete = from_end(prompt.real) <= (prompt.lengths % size)[:, None]
        heads = view.keys.shape[1]
        return Decision(
            keep=(~chooses[:, None] | incomplete)[:, None],
            offload=Offload(chooses[:, None].expand(-1, heads), size, "device", summary="bounds"),
            chunks=pages[:, None].expand(-1, heads),
        )

    def _page(self, request: PromptView) -> int:
        """Return the tokens per page."""
        if self.page_size != "auto":
            return self.page_size
        least = int(request.budget_tokens(self.budget).min())
        return next((size for size in PAGES if least >= PAGES_READ * size), PAGES[-1])

    def _chosen_pages(self, request: PromptView, size: int) -> Tensor:
        """Return the number of complete pages of `size` tokens that a step attends to: int64 [B]."""
        room = request.budget_tokens(self.budget) - request.prompt.lengths % size
        return torch.div(room, size, rounding_mode="floor").clamp_min(1)

    def results(self, view: ResultView) -> Results:
        """Return the number of heads that select pages, over all layers, the bytes of the bounds and the page size."""
        size = self._page(view.request)
        figures = {"choosing_heads": view.choosing_heads, "bound_bytes": view.digest_bytes, "page_size": size}
        notes: tuple[str, ...] = ()
        if self.page_size == "auto" and size != PAPER_PAGE and view.choosing_heads:
            notes = (
                f"page_size=auto: pages of {size} tokens instead of {PAPER_PAGE}, since the budget holds few; their "
                f"bounds take {PAPER_PAGE // size} times the memory",
            )
        return Results(figures, notes=notes)

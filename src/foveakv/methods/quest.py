"""Quest: query-aware page selection without eviction (Tang et al., arXiv 2406.10774)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from foveakv.core.budget import parse_budget
from foveakv.core.columns import from_end
from foveakv.methods.base import Method
from foveakv.methods.checks import whole_number
from foveakv.methods.results import Results
from foveakv.methods.views import Decision, Offload, PrefillView, PromptView, ResultView, When


@dataclass
class Quest(Method):
    """Keep all keys and values on the device and attend in every step to the most critical pages of the prompt.

    The prompt is split into pages of 16 tokens, with the minimum and maximum of every key channel. The criticality of a
    page is an upper bound of q . k for its keys: the sum over channels of max(q * min, q * max). The budget / page_size
    pages with the highest criticality are attended to in full (Sec. 3, Alg. 1). The first two layers attend to
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
        page_size: tokens per page.
        full_layers: number of first layers that attend to everything, in addition to the budget.
    """

    budget: float | int | str = 0.2
    page_size: int = 16
    full_layers: int = 2

    name: ClassVar[str] = "quest"

    def __post_init__(self) -> None:
        parse_budget(self.budget)
        whole_number(self.name, "page_size", self.page_size, 1, "tokens per page")
        whole_number(self.name, "full_layers", self.full_layers, 0, "first layers that attend to everything")

    @property
    def decides(self) -> tuple[When, ...]:
        """Builds pages at the end of the prompt and selects among them in every step."""
        return "prefill", "read"

    def prefill(self, view: PrefillView) -> Decision | None:
        """Split one layer's prompt into pages, with the bounds of their keys as digests."""
        if view.compressed_idx < self.full_layers:
            return None
        prompt, pages = view.prompt, self._chosen_pages(view.request)
        chooses = pages < prompt.lengths // self.page_size  # [B]
        if not bool(chooses.any()):
            return None
        incomplete = from_end(prompt.real) <= (prompt.lengths % self.page_size)[:, None]
        heads = view.keys.shape[1]
        return Decision(
            keep=(~chooses[:, None] | incomplete)[:, None],
            offload=Offload(chooses[:, None].expand(-1, heads), self.page_size, "device", summary="bounds"),
            chunks=pages[:, None].expand(-1, heads),
        )

    def _chosen_pages(self, request: PromptView) -> Tensor:
        """Return the number of complete pages that a step attends to: int64 [B]."""
        room = request.budget_tokens(self.budget) - request.prompt.lengths % self.page_size
        return torch.div(room, self.page_size, rounding_mode="floor").clamp_min(1)

    def results(self, view: ResultView) -> Results:
        """Return the number of heads that select pages, over all layers, and the bytes of the bounds."""
        return Results({"choosing_heads": view.choosing_heads, "bound_bytes": view.digest_bytes})

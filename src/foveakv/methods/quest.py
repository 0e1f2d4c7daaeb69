"""Quest: nothing is dropped; every step attends to the pages whose keys may matter most (arXiv 2406.10774)."""

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
    """All keys and values stay on the device; every step attends to the pages of the prompt that may matter most.

    The prompt is cut into pages of 16 tokens with the minimum and maximum of every key channel. A page's criticality is
    the largest q . k that a key within these bounds can have, sum over channels of max(q * min, q * max); the best
    budget / page_size pages are attended to in full (Tang et al., Sec. 3, Alg. 1). The first two layers attend to all.
    This saves reads and no memory.

    Not stated; we choose one set of pages for all query heads of a KV head (and all tokens of a later turn) by the
    maximum of each one's softmax over pages, which for a single query is the paper's order; count the incomplete last
    page in the budget and always attend to it; always choose at least one page; and attend to all decoded tokens, on
    top of the budget.

    Args:
        budget: tokens of the prompt per KV head that a step attends to in every layer behind the first `full_layers`;
            a number of bytes means as many tokens as that memory would hold.
        page_size: tokens of a page.
        full_layers: so many first layers attend to everything, on top of the budget.
    """

    budget: float | int | str = 0.2
    page_size: int = 16
    full_layers: int = 2

    name: ClassVar[str] = "quest"

    def __post_init__(self) -> None:
        parse_budget(self.budget)
        whole_number(self.name, "page_size", self.page_size, 1, "tokens of a page")
        whole_number(self.name, "full_layers", self.full_layers, 0, "first layers that attend to everything")

    @property
    def decides(self) -> tuple[When, ...]:
        return "prefill", "read"

    def prefill(self, view: PrefillView) -> Decision | None:
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
        """Complete pages that a step attends to: int64 [B]."""
        room = request.budget_tokens(self.budget) - request.prompt.lengths % self.page_size
        return torch.div(room, self.page_size, rounding_mode="floor").clamp_min(1)

    def results(self, view: ResultView) -> Results:
        """Heads that choose pages in every step, over all layers, and the bytes of the bounds."""
        return Results({"choosing_heads": view.choosing_heads, "bound_bytes": view.digest_bytes})

"""Quest: nothing is dropped; every step attends to the pages whose keys may matter most (arXiv 2406.10774)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from foveakv.core.budget import parse_budget
from foveakv.core.columns import from_end
from foveakv.errors import CacheInUseError
from foveakv.kernels.paged import reads_pages
from foveakv.memory.chunks import ChunkStore
from foveakv.methods.base import DecodeView, Method, PrefillView
from foveakv.methods.checks import whole_number
from foveakv.methods.retrieval import retrieve

if TYPE_CHECKING:
    from foveakv.engines.transformers.cache import CompressedCache


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
    def retrieves(self) -> bool:
        return True

    def prefill(self, view: PrefillView) -> Tensor | None:
        if view.compressed_idx < self.full_layers:
            return None
        prompt = view.prompt
        chooses = self._chosen_pages(view.cache) < prompt.lengths // self.page_size  # [B]
        if not bool(chooses.any()):
            return None
        heads = chooses[:, None].expand(-1, view.keys.shape[1])
        store = ChunkStore(
            view.keys, view.values, prompt.real, view.positions, heads,
            chunk=self.page_size, place="device", summary="bounds",
        )  # fmt: skip
        view.state["store"] = store
        view.cache.compressed[view.compressed_idx].extra_memory.append(store)
        incomplete = from_end(prompt.real) <= (prompt.lengths % self.page_size)[:, None]
        return (~chooses[:, None] | incomplete)[:, None]

    def after_prefill(self, cache: CompressedCache) -> None:
        pages = self._chosen_pages(cache)[:, None]
        for layer in cache.compressed:
            store: ChunkStore | None = layer.state.get("store")
            if store is None:
                continue
            if layer.segments is None:
                raise CacheInUseError("the prompt has not been processed")
            in_place = reads_pages(layer.segments.runs, store.stored, cache.backend)
            store.reserve(layer.segments, pages.expand(-1, layer.segments.heads), in_place=in_place)

    def _chosen_pages(self, cache: CompressedCache) -> Tensor:
        """Complete pages that a step attends to: int64 [B]."""
        room = self.budget_tokens(cache, self.budget) - cache.full_prompt.lengths % self.page_size
        return torch.div(room, self.page_size, rounding_mode="floor").clamp_min(1)

    def before_attention(self, view: DecodeView) -> None:
        store: ChunkStore | None = view.state.get("store")
        if store is not None:
            retrieve(store, view)

    def summary(self, cache: CompressedCache) -> dict[str, Any]:
        """Pages that a step chooses, over all heads of the layers that choose, and what the bounds take."""
        stores = [layer.state["store"] for layer in cache.compressed if "store" in layer.state]
        return {
            "choosing_heads": sum(store.choosing for store in stores),
            "bound_bytes": sum(store.digest_nbytes for store in stores),
        }

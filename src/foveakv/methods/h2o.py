"""H2O: keep heavy hitters and recent tokens (Zhang et al., arXiv 2306.14048, Sec. 4)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from torch import Tensor

from foveakv.core.budget import parse_budget
from foveakv.methods import checks
from foveakv.methods.base import DecodeView, Drop, Method, PrefillView
from foveakv.methods.ddes import RecycleBin, check_rows, prompt_scores

if TYPE_CHECKING:
    from foveakv.engines.transformers.cache import CompressedCache


@dataclass
class H2O(Method):
    """Per KV head: part of the budget for the tokens with the most cumulative attention, the rest for the newest.

    Scores sum the attention from all queries, the prompt's included; each decode step evicts the lowest-scored token
    that is not recent. It is HAE's decode eviction with a recycle bin of one token.

    Args:
        budget: tokens that stay, heavy and recent together: a share of the prompt, tokens per head, or bytes.
        heavy_ratio: the heavy hitters' part of the budget, rounded down.
        per_head_scores: every KV head ranks for itself (not stated in the paper); False sums scores over heads.
        prefill_rows: which prompt queries count: "all", or a number of sampled rows (ours).
    """

    budget: float | int | str = 0.2
    heavy_ratio: float = 0.5
    per_head_scores: bool = True
    prefill_rows: Literal["all"] | int = "all"

    name: ClassVar[str] = "h2o"

    def __post_init__(self) -> None:
        parse_budget(self.budget)
        checks.share(self.name, "heavy_ratio", self.heavy_ratio, meaning="the heavy hitters' part of the budget")
        checks.flag(self.name, "per_head_scores", self.per_head_scores)
        check_rows(self.name, self.prefill_rows)

    @property
    def needs_attention_sum(self) -> bool:
        return True

    @property
    def evicts_while_decoding(self) -> bool:
        return True

    @property
    def _bin(self) -> RecycleBin:
        return RecycleBin(size=1, per_head=self.per_head_scores)

    def needs_queries(self, compressed_idx: int) -> bool:
        return True

    def begin(self, cache: CompressedCache) -> None:
        if cache.geometry is not None:
            steady = parse_budget(self.budget).steady(cache.geometry)
            heavy = (steady.double() * self.heavy_ratio + 1e-9).floor().long()
            cache.state["h2o"] = steady, steady - heavy

    def prefill(self, view: PrefillView) -> Tensor:
        steady, recent = view.cache.state["h2o"]
        sums = prompt_scores(view, self.prefill_rows)
        keep = view.prompt.real[:, None].expand_as(sums)
        keep = self._bin.shrink(sums, keep, steady, recent)
        self._bin.note(view.state, sums, keep, steady, recent)
        return keep

    def after_prefill(self, cache: CompressedCache) -> None:
        self._bin.open(cache)

    def decode(self, view: DecodeView) -> Tensor | Drop | None:
        return self._bin.step(view)

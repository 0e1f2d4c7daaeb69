"""PrefixKV: every layer keeps the shortest prefix of its ranking that holds one common share of attention.

Wang et al., arXiv 2412.03409.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor

from foveakv.core.budget import parse_budget
from foveakv.core.columns import from_end
from foveakv.core.selection import keep_top
from foveakv.methods.base import Method
from foveakv.methods.checks import whole_number
from foveakv.methods.prompt_scores import check_rows, prompt_scores
from foveakv.methods.results import Results
from foveakv.methods.views import (
    Decision,
    Granularity,
    Observes,
    PrefillView,
    PromptEndView,
    PromptView,
    ResultView,
    State,
    When,
)


@dataclass
class PrefixKVState(State):
    """scores: [B, C] for every layer, during the prefill. share: float64 [B], p. tokens: int64 [B, L]."""

    scores: list[Tensor] = field(default_factory=list)
    share: Tensor | None = None
    tokens: Tensor | None = None


@dataclass
class PrefixKV(Method):
    """Per layer: the tokens with the most attention, as many as it takes to hold the same share p of it in all layers.

    A token's importance in a layer is the attention that it gets from all prompt rows, averaged over heads; all heads
    keep the same tokens. p is what meets the budget; the paper finds it by a binary search. The search has an exact
    end, which we compute: of all layers' entries, ranked by the share that lies before them in their own layer, the
    lowest stay. All layers are known only at the end of the prompt, so the peak is that of a full cache.

    Not stated in the paper, or not clearly; we
    - find p for every prompt; the paper finds layer sizes once, on ten samples, and reuses them;
    - keep the first `sink` tokens and the last one, before all others, as the authors' code does;
    - leave decoded tokens alone; the authors' code also drops one older token in a step, to keep to the ratio.

    Args:
        budget: slots of all layers and heads together: share of the prompt, tokens per head on average, or bytes.
        sink: first tokens that stay.
        recent: newest tokens that stay.
        prefill_rows: which prompt queries count: "all", or a number of sampled rows (ours).
    """

    budget: float | int | str = 0.2
    sink: int = 4
    recent: int = 1
    prefill_rows: Literal["all"] | int = "all"

    name: ClassVar[str] = "prefixkv"

    def __post_init__(self) -> None:
        parse_budget(self.budget)
        whole_number(self.name, "sink", self.sink, 0, "first tokens that always stay")
        whole_number(self.name, "recent", self.recent, 0, "newest tokens that always stay")
        check_rows(self.name, self.prefill_rows)

    @property
    def granularity(self) -> Granularity:
        return "layer"

    @property
    def observes(self) -> Observes:
        return Observes(queries="all")

    @property
    def decides(self) -> tuple[When, ...]:
        return ("after_prefill",)

    def begin(self, request: PromptView) -> PrefixKVState:
        return PrefixKVState()

    def prefill(self, view: PrefillView) -> None:
        sums = prompt_scores(view, self.prefill_rows).sum(1)
        view.state.scores.append(sums.masked_fill(~view.prompt.real, 0.0))

    def after_prefill(self, view: PromptEndView) -> list[Decision]:
        state: PrefixKVState = view.state
        request, prompt = view.request, view.request.prompt
        scores, state.scores = torch.stack(state.scores, 1), []  # [B, L, C]
        protected = self._protected(prompt.real)  # [B, C]
        totals = (request.budget_slots(self.budget) // request.geometry.kv_heads).to(scores.device)
        keep, state.share = common_prefix(scores, prompt.real, protected, totals)
        state.tokens = keep.sum(-1)
        return [Decision(keep=keep[:, layer, None]) for layer in range(keep.shape[1])]

    def results(self, view: ResultView) -> Results:
        """The share p that every layer keeps and each layer's tokens per head, for each sequence."""
        share, tokens = view.state.share, view.state.tokens
        if share is None or tokens is None:
            return Results()
        return Results({"share": share.tolist(), "tokens": tokens.tolist()}, layer_tokens=tokens)

    def _protected(self, real: Tensor) -> Tensor:
        """Which columns go first, and in which order: int64 [B, C], 0 for none, else the higher the earlier."""
        age, place = from_end(real), real.cumsum(-1)
        recent = torch.where(real & (age <= self.recent), self.sink + self.recent + 1 - age, 0)
        sink = torch.where(real & (place <= self.sink), self.sink + 1 - place, 0)
        return torch.maximum(recent, sink)


def common_prefix(scores: Tensor, real: Tensor, protected: Tensor, totals: Tensor) -> tuple[Tensor, Tensor]:
    """Prefixes of all layers' rankings that hold the same share of their layer's attention.

    Args:
        scores: [B, L, C], not negative, 0 at padding.
        real: bool [B, C]. protected: int64 [B, C], 0 or the rank before all others, see `PrefixKV._protected`.
        totals: int64 [B], tokens of all layers together.

    Returns:
        keep bool [B, L, C] with min(totals, real columns of all layers) marks, and the share p [B] float64: every layer
        keeps as many of its best tokens as hold p of it, but for the one token at which the total is reached.
    """
    batch, layers, columns = scores.shape
    attention_sum = scores.double()
    first, real = protected[:, None].expand_as(attention_sum), real[:, None].expand_as(attention_sum)
    # protected ones in their order, then by score, padding last; equal scores: the lower column
    order = attention_sum.masked_fill(~real, -1.0).argsort(dim=-1, descending=True, stable=True)
    order = order.gather(-1, first.gather(-1, order).argsort(dim=-1, descending=True, stable=True))
    ranked = attention_sum.gather(-1, order)
    before = (ranked.cumsum(-1) - ranked) / ranked.sum(-1, keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)
    before = before.cummax(-1).values  # rounding must not let a later entry overtake an earlier one
    # Protected ones cost a layer nothing: the first of every layer go before the second of any.
    place = torch.arange(columns, device=scores.device, dtype=torch.float64)
    cost = torch.where(first.gather(-1, order) > 0, place - columns, before)
    cost = cost.masked_fill(~real.gather(-1, order), torch.inf)
    taken = keep_top(-cost.transpose(1, 2).flatten(1), totals).view(batch, columns, layers).transpose(1, 2)
    keep = torch.zeros_like(taken).scatter_(-1, order, taken)
    share = cost.masked_fill(~taken, 0.0).flatten(1).amax(-1).clamp_min(0.0)
    return keep, share

"""PrefixKV: every layer keeps the prefix of its ranking that holds a common share of attention.

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
    """State of one request.

    Per layer, during the prefill: scores [B, C], candidates bool [B, C]. share: float64 [B], p. tokens: int64 [B, L],
    tokens per head.
    """

    scores: list[Tensor] = field(default_factory=list)
    candidates: list[Tensor] = field(default_factory=list)
    share: Tensor | None = None
    tokens: Tensor | None = None


@dataclass
class PrefixKV(Method):
    """Keep in every layer the most attended tokens that together hold a share p of attention, the same in all layers.

    A token's importance in a layer is the attention it receives from all prompt rows, averaged over heads; all heads
    keep the same tokens. p is determined by the budget. The paper finds it by binary search; we compute the limit of
    that search directly: entries of all layers are ranked by the cumulative share before them in their own layer, and
    the lowest are kept. No layer can be pruned before all layers have been read, so the peak memory is that of a full
    cache.

    Not stated in the paper, or not clearly; we
    - compute p for every prompt; the paper computes layer sizes once, on ten samples, and reuses them;
    - keep the first `sink` tokens and the last one before all others, as the authors' code does;
    - never evict decoded tokens; the authors' code also evicts one older token per step, to maintain the ratio.

    Args:
        budget: slots over all layers and heads: a share of the prompt, tokens per head on average, or bytes.
        sink: number of first tokens that are always kept.
        recent: number of newest tokens that are always kept.
        prefill_rows: prompt queries that count for the scores: "all", or a number of sampled rows (not in the paper).
    """

    budget: float | int | str = 0.2
    sink: int = 4
    recent: int = 1
    prefill_rows: Literal["all"] | int = "all"

    name: ClassVar[str] = "prefixkv"

    def __post_init__(self) -> None:
        parse_budget(self.budget)
        whole_number(self.name, "sink", self.sink, 0, "first tokens that are always kept")
        whole_number(self.name, "recent", self.recent, 0, "newest tokens that are always kept")
        check_rows(self.name, self.prefill_rows)

    @property
    def granularity(self) -> Granularity:
        """All heads of a layer store the same tokens."""
        return "layer"

    @property
    def observes(self) -> Observes:
        """All prompt queries."""
        return Observes(queries="all")

    @property
    def decides(self) -> tuple[When, ...]:
        """Evicts after the last layer's prefill."""
        return ("after_prefill",)

    def begin(self, request: PromptView) -> PrefixKVState:
        """Return an empty state."""
        return PrefixKVState()

    def prefill(self, view: PrefillView) -> None:
        """Compute the scores of one layer."""
        sums, candidates = prompt_scores(view, self.prefill_rows).sum(1), view.candidates.any(1)
        view.state.scores.append(sums.masked_fill(~candidates, 0.0))
        view.state.candidates.append(candidates)

    def after_prefill(self, view: PromptEndView) -> list[Decision]:
        """Find p and the prefix of every layer."""
        state: PrefixKVState = view.state
        request, widths = view.request, [each.shape[-1] for each in state.scores]
        scores, real = _stacked(state.scores), _stacked(state.candidates)  # [B, L, C]
        state.scores, state.candidates = [], []
        totals = (request.budget_slots(self.budget) // request.geometry.kv_heads).to(scores.device)
        keep, state.share = common_prefix(scores, real, self._protected(real), totals)
        state.tokens = keep.sum(-1)
        return [Decision(keep=keep[:, layer, None, -width:]) for layer, width in enumerate(widths)]

    def results(self, view: ResultView) -> Results:
        """Return the share p that every layer keeps and the tokens per head of every layer, for each sequence."""
        share, tokens = view.state.share, view.state.tokens
        if share is None or tokens is None:
            return Results()
        return Results({"share": share.tolist(), "tokens": tokens.tolist()}, layer_tokens=tokens)

    def _protected(self, real: Tensor) -> Tensor:
        """Return the priority of protected columns: int64, 0 for other columns; higher is selected earlier."""
        age, place = from_end(real), real.cumsum(-1)
        recent = torch.where(real & (age <= self.recent), self.sink + self.recent + 1 - age, 0)
        sink = torch.where(real & (place <= self.sink), self.sink + 1 - place, 0)
        return torch.maximum(recent, sink)


def _stacked(layers: list[Tensor]) -> Tensor:
    """Stack tensors [B, C] of several layers to [B, L, C], with zeros before those that have fewer columns."""
    width = max(each.shape[-1] for each in layers)
    return torch.stack([torch.nn.functional.pad(each, (width - each.shape[-1], 0)) for each in layers], 1)


def common_prefix(scores: Tensor, real: Tensor, protected: Tensor, totals: Tensor) -> tuple[Tensor, Tensor]:
    """Select the prefixes of all layers' rankings that hold the same share of their layer's attention.

    Args:
        scores: [B, L, C], not negative, 0 at padding.
        real: bool [B, C] or [B, L, C].
        protected: int64, like `real`: priority over all other columns, or 0; see `PrefixKV._protected`.
        totals: int64 [B], tokens over all layers.

    Returns:
        keep, bool [B, L, C] with min(totals, real columns of all layers) marks, and the share p, float64 [B]. Every
        layer keeps as many of its best tokens as hold p of its attention, except for the one token at which the total
        is reached.
    """
    batch, layers, columns = scores.shape
    attention_sum = scores.double()
    first, real = (each[:, None].expand_as(scores) if each.dim() == 2 else each for each in (protected, real))
    # protected columns by priority, then by score, padding last; ties go to the lower column
    order = attention_sum.masked_fill(~real, -1.0).argsort(dim=-1, descending=True, stable=True)
    order = order.gather(-1, first.gather(-1, order).argsort(dim=-1, descending=True, stable=True))
    ranked = attention_sum.gather(-1, order)
    before = (ranked.cumsum(-1) - ranked) / ranked.sum(-1, keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)
    before = before.cummax(-1).values  # rounding must not let a later entry overtake an earlier one
    # Protected columns cost nothing: the first of every layer are selected before the second of any layer.
    place = torch.arange(columns, device=scores.device, dtype=torch.float64)
    cost = torch.where(first.gather(-1, order) > 0, place - columns, before)
    cost = cost.masked_fill(~real.gather(-1, order), torch.inf)
    taken = keep_top(-cost.transpose(1, 2).flatten(1), totals).view(batch, columns, layers).transpose(1, 2)
    keep = torch.zeros_like(taken).scatter_(-1, order, taken)
    share = cost.masked_fill(~taken, 0.0).flatten(1).amax(-1).clamp_min(0.0)
    return keep, share

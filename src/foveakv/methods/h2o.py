"""H2O: keep heavy hitters and recent tokens (Zhang et al., arXiv 2306.14048, Sec. 4)."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar, Literal

from torch import Tensor

from foveakv.core.budget import parse_budget
from foveakv.methods import checks
from foveakv.methods.base import Method
from foveakv.methods.ddes import BinState, RecycleBin, accumulated
from foveakv.methods.prompt_scores import check_rows, prompt_scores
from foveakv.methods.views import (
    Decision,
    DecodeView,
    Granularity,
    Observes,
    PrefillView,
    PromptView,
    State,
    When,
)

_OBSERVES = Observes(queries="all", attention_sum=True)


@dataclass
class H2OState(State):
    """State of one request.

    steady: int64 [B], tokens per head to keep. recent: int64 [B], how many of them are the newest. bins: cumulative
    attention and counts, see `RecycleBin`.
    """

    steady: Tensor
    recent: Tensor
    bins: BinState = field(default_factory=BinState)


@dataclass
class H2O(Method):
    """Keep the tokens with the most accumulated attention and the newest tokens in every KV head, also while decoding.

    Scores sum the attention from all queries, those of the prompt included. Each decode step evicts the lowest-scored
    token that is not recent. This is HAE's decode eviction with a recycle bin of one token.

    Args:
        budget: tokens to keep, heavy hitters and recent tokens together: a share of the prompt, tokens per head, or
            bytes.
        heavy_ratio: share of the budget for heavy hitters, rounded down.
        per_head_scores: rank tokens per KV head (not stated in the paper); False sums scores over heads.
        prefill_rows: prompt queries that count for the scores: "all", or a number of sampled rows (not in the paper).
    """

    budget: float | int | str = 0.2
    heavy_ratio: float = 0.5
    per_head_scores: bool = True
    prefill_rows: Literal["all"] | int = "all"

    name: ClassVar[str] = "h2o"

    def __post_init__(self) -> None:
        parse_budget(self.budget)
        checks.share(self.name, "heavy_ratio", self.heavy_ratio, meaning="the share of the budget for heavy hitters")
        checks.flag(self.name, "per_head_scores", self.per_head_scores)
        check_rows(self.name, self.prefill_rows)

    @property
    def granularity(self) -> Granularity:
        """Per head, or per layer if scores are summed over heads."""
        return "head" if self.per_head_scores else "layer"

    @property
    def observes(self) -> Observes:
        """All prompt queries, and the attention sum of every decode step."""
        return _OBSERVES

    @property
    def decides(self) -> tuple[When, ...]:
        """Evicts at the end of the prompt and in every decode step."""
        return "prefill", "decode"

    @cached_property
    def _bin(self) -> RecycleBin:
        return RecycleBin(size=1, per_head=self.per_head_scores)

    def begin(self, request: PromptView) -> H2OState:
        """Split the budget into heavy hitters and recent tokens."""
        steady = request.budget_tokens(self.budget, steady=True)
        heavy = (steady.double() * self.heavy_ratio + 1e-9).floor().long()
        return H2OState(steady, steady - heavy)

    def continue_context(self, request: PromptView, state: State | None) -> H2OState:
        """Split the budget of the context so far; the bins go on counting."""
        made = self.begin(request)
        if isinstance(state, H2OState):
            made.bins = state.bins.emptied()
        return made

    def prefill(self, view: PrefillView) -> Decision:
        """Keep the heavy hitters and the newest tokens."""
        state: H2OState = view.state
        sums = accumulated(view, prompt_scores(view, self.prefill_rows))
        keep = view.candidates.expand_as(sums)
        keep = self._bin.shrink(sums, keep, state.steady, state.recent)
        state.bins.add_layer(state.steady, state.recent)
        return Decision(keep=keep, fields=self._bin.fields(sums))

    def decode(self, view: DecodeView) -> Decision | None:
        """Accumulate the attention of the step and evict the lowest-scored token of every head that is over budget."""
        return self._bin.step(view, view.state.bins)

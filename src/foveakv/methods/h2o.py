"""H2O: keep heavy hitters and recent tokens (Zhang et al., arXiv 2306.14048, Sec. 4)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from torch import Tensor

from foveakv.core.budget import parse_budget
from foveakv.methods import checks
from foveakv.methods.base import Method
from foveakv.methods.ddes import BinState, RecycleBin
from foveakv.methods.prompt_scores import check_rows, prompt_scores
from foveakv.methods.results import Results
from foveakv.methods.views import (
    Decision,
    DecodeView,
    Granularity,
    Observes,
    PrefillView,
    PromptView,
    ResultView,
    State,
    When,
)


@dataclass
class H2OState(State):
    """steady, recent: int64 [B], tokens per head that stay, and those of them that are the newest."""

    steady: Tensor
    recent: Tensor
    bins: BinState = field(default_factory=BinState)


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
    def granularity(self) -> Granularity:
        return "head" if self.per_head_scores else "layer"

    @property
    def observes(self) -> Observes:
        return Observes(queries="all", attention_sum=True)

    @property
    def decides(self) -> tuple[When, ...]:
        return "prefill", "decode"

    @property
    def _bin(self) -> RecycleBin:
        return RecycleBin(size=1, per_head=self.per_head_scores)

    def begin(self, request: PromptView) -> H2OState:
        steady = request.budget_tokens(self.budget, steady=True)
        heavy = (steady.double() * self.heavy_ratio + 1e-9).floor().long()
        return H2OState(steady, steady - heavy)

    def prefill(self, view: PrefillView) -> Decision:
        state: H2OState = view.state
        sums = prompt_scores(view, self.prefill_rows)
        keep = view.prompt.real[:, None].expand_as(sums)
        keep = self._bin.shrink(sums, keep, state.steady, state.recent)
        state.bins.add_layer(state.steady, state.recent)
        return Decision(keep=keep, fields=self._bin.fields(sums))

    def decode(self, view: DecodeView) -> Decision | None:
        return self._bin.step(view, view.state.bins)

    def results(self, view: ResultView) -> Results:
        return Results()

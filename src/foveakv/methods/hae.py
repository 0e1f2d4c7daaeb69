"""HAE: Hierarchical Adaptive Eviction (arXiv 2602.02197).

DAP (dual-attention pruning) prunes visual tokens of the prompt by the attention from text tokens in the first layer.
DDES (dynamic decoding eviction strategy, `ddes.py`) evicts text and visual tokens while decoding, through a recycle
bin.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from foveakv.core import attention_stats as scores
from foveakv.core.budget import parse_budget
from foveakv.core.selection import keep_top
from foveakv.errors import MethodError, NoVisualTokensError
from foveakv.methods import checks
from foveakv.methods.base import Method
from foveakv.methods.ddes import BinState, RecycleBin, check_room
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

R, RELATIVE_R, ALPHA = 0.0012, 0.7, 0.001
# The paper's values for its models.
PRESETS: dict[str, dict[str, Any]] = {
    "llava-1.5": {"r": 0.0012, "alpha": 0.001, "recycle_bin_size": 64},
    "phi-3.5-vision": {"r": 0.0015, "alpha": 0.0015, "recycle_bin_size": 56},
    "phi-3.5-vision-story": {"r": 0.0005, "alpha": 0.0005, "recycle_bin_size": 128, "budget": 1024},
}

# Options of DAP with their defaults; setting one of them without DAP is an error.
_DAP_OPTIONS: dict[str, Any] = {
    "r": None,
    "relative": False,
    "c": None,
    "target_visual_tokens": None,
    "criterion": "dual",
    "drop_hidden_states": False,
    "statistics": False,
}


@dataclass
class HAEState(State):
    """State of one request.

    keep: bool [B, C], the columns that DAP keeps in all layers. steady, recent: int64 [B], for DDES. longer: whether a
    sequence exceeds its steady size after DAP. bins: see `RecycleBin`. figures: plain values for the report.
    """

    keep: Tensor
    steady: Tensor | None = None
    recent: Tensor | None = None
    longer: bool = False
    bins: BinState = field(default_factory=BinState)
    figures: dict[str, Any] = field(default_factory=dict)


@dataclass
class HAE(Method):
    """Prune visual tokens by the first layer's text attention; while decoding, evict `recycle_bin_size` tokens at once.

    DAP: A[i, j] is the attention from text token i to visual token j in the first layer, averaged over heads (the paper
    does not state how heads are combined). Visual token j is evicted from every layer if a_j = sum_i A[i, j]
    < r * sum_j a_j (Eq. 1-2) and m_j = max_i A[i, j] < alpha (Eq. 3). At most `c` tokens are evicted (Def. 1), those
    with the lowest a_j.

    DDES: tokens accumulate attention (Eq. 5). While decoding, l <= tokens < l + D holds (Def. 2), and the D tokens with
    the lowest scores are evicted at once (Eq. 4). l is `budget` and D is `recycle_bin_size`.

    Args:
        dap, ddes: the two stages; disable one to run the other alone.
        r: share in Eq. 2; None = 0.0012 (the paper's value for LLaVA-1.5), or 0.7 with `relative`.
        relative: r is a multiple of the uniform share 1 / V, and so independent of the number V of visual tokens (not
            in the paper).
        alpha: threshold of Eq. 3; None = no individual test (not in the paper).
        c: the most visual tokens to evict per sequence; None = no limit.
        target_visual_tokens: number of visual tokens to keep per sequence, or their share, those with the highest a_j;
            replaces the two tests (not in the paper).
        criterion: "dual" (the paper's equations), "variance" (tokens whose variance over text rows is below the
            `variance_quantile` of the sequence's visual tokens), or "dual+variance" (both must hold).
        drop_hidden_states: also prune these tokens from the residual stream after the first layer, so that later layers
            do not compute them (not stated in the paper).
        budget: steady size l: a share of the prompt, tokens per head, or bytes; None = the length of the prompt after
            DAP. Up to `recycle_bin_size` - 1 more tokens are stored before a flush.
        compress_prompt: evict from a longer prompt, by its own scores, until l tokens are left (not stated in the
            paper); False sets l to the length of such a prompt.
        recycle_bin_size: D.
        mode, restore, score, frequency_weight: which tokens a flush evicts, see `ddes.RecycleBin`.
        recent, sink: number of newest and oldest tokens that are never evicted; 0 in the paper.
        per_head_scores: rank tokens per KV head; False sums scores over heads (not stated in the paper).
        prefill_rows: prompt queries that count for the scores: "all", or a number of sampled rows (not in the paper).
        statistics: also measure the first layer's attention to visual and text tokens: the share of probabilities
            up to 1e-4 (the paper's sparsity) and the mean variance.

    `results` has `evicted_visual` (tokens that DAP evicted, per sequence), `evicted_prompt` (slots evicted to reduce
    the prompt to l), the statistics, and the figures of `ddes.BinState`.
    """

    budget: float | int | str | None = None
    dap: bool = True
    ddes: bool = True
    r: float | None = None
    alpha: float | None = ALPHA
    relative: bool = False
    c: int | None = None
    target_visual_tokens: int | float | None = None
    criterion: Literal["dual", "variance", "dual+variance"] = "dual"
    variance_quantile: float = 0.6
    drop_hidden_states: bool = False
    recycle_bin_size: int = 64
    mode: Literal["rerank", "mark"] = "rerank"
    restore: bool = True
    score: Literal["attention", "frequency+importance"] = "attention"
    frequency_weight: float = 0.5
    recent: int = 0
    sink: int = 0
    compress_prompt: bool = True
    per_head_scores: bool = False
    prefill_rows: Literal["all"] | int = "all"
    statistics: bool = False

    name: ClassVar[str] = "hae"

    @classmethod
    def preset(cls, name: str, **options: Any) -> HAE:
        """Return the paper's settings for one of its models (see `PRESETS`), overridden by `options`.

        Raises:
            MethodError: there is no such preset.
        """
        if name not in PRESETS:
            raise MethodError(f"HAE has no preset {name!r}; choose one of {', '.join(PRESETS)}")
        return cls(**{**PRESETS[name], **options})

    def __post_init__(self) -> None:
        for option in ("dap", "ddes", "relative", "drop_hidden_states", "compress_prompt", "statistics"):
            checks.flag(self.name, option, getattr(self, option))
        if not self.dap and not self.ddes:
            raise MethodError("hae: dap=False and ddes=False leaves nothing to do; use the method 'full' instead")
        self._check_dap()
        self._bin.validate("hae")
        if self.budget is not None:
            parse_budget(self.budget)
            if not self.ddes:
                raise MethodError(
                    "hae: budget is the steady size of DDES; with ddes=False use target_visual_tokens, r and alpha"
                )
        checks.whole_number(self.name, "recent", self.recent, 0, "newest tokens that are always kept")
        check_rows(self.name, self.prefill_rows)

    def _check_dap(self) -> None:
        if self.r is not None:
            checks.number(self.name, "r", self.r, 0, meaning="a share of attention is never negative")
        if self.alpha is not None:
            checks.number(self.name, "alpha", self.alpha, 0, meaning="a probability; None = no individual test")
        if self.c is not None:
            checks.whole_number(self.name, "c", self.c, 0, "the most tokens to evict; None = no limit")
        checks.choice(self.name, "criterion", self.criterion, ("dual", "variance", "dual+variance"))
        checks.share(self.name, "variance_quantile", self.variance_quantile, above_zero=True)
        target = self.target_visual_tokens
        if target is not None:
            number = isinstance(target, Real) and not isinstance(target, bool)
            # `not >=` also refuses nan, which compares as False with everything.
            if not number or not target >= 0 or (not isinstance(target, Integral) and target > 1):
                raise MethodError(
                    "hae: target_visual_tokens must be a number of tokens (192) or a share of them (0.33); "
                    f"got {target!r}"
                )
            if self.criterion != "dual" or self.c is not None:
                raise MethodError(
                    "hae: target_visual_tokens replaces all tests; leave criterion and c at their defaults"
                )
        if not self.dap:
            given = {name: getattr(self, name) for name in _DAP_OPTIONS}
            for option, value in given.items():
                if value != _DAP_OPTIONS[option]:
                    raise MethodError(f"hae: {option}={value!r} is an option of DAP and needs dap=True")

    # ---- declarations for the engine

    @property
    def _bin(self) -> RecycleBin:
        return RecycleBin(
            size=self.recycle_bin_size, mode=self.mode, restore=self.restore, score=self.score,
            frequency_weight=self.frequency_weight, per_head=self.per_head_scores, sink=self.sink,
        )  # fmt: skip

    @property
    def granularity(self) -> Granularity:
        """One set of tokens for all layers with DAP alone; with DDES per layer, or per head with `per_head_scores`."""
        if not self.ddes:
            return "token"
        return "head" if self.per_head_scores else "layer"

    @property
    def observes(self) -> Observes:
        """Text queries for DAP; for DDES all prompt queries and the attention sum of every decode step."""
        return Observes(queries="all", attention_sum=True) if self.ddes else Observes(queries="text")

    @property
    def decides(self) -> tuple[When, ...]:
        """Evicts at the end of the prompt and, with DDES, while decoding."""
        return ("prefill", "decode") if self.ddes else ("prefill",)

    @property
    def prunes_after(self) -> int | None:
        """The first layer, with `drop_hidden_states`."""
        return 0 if self.drop_hidden_states else None

    def needs_queries(self, compressed_idx: int) -> bool:
        """True for the first layer; with DDES for all layers."""
        return self.ddes or compressed_idx == 0

    # ---- prefill

    def begin(self, request: PromptView) -> HAEState:
        """Check that the prompt has visual tokens to evict and that the budget holds the protected tokens."""
        prompt = request.prompt
        if not self.ddes and not bool(prompt.visual.any()):
            raise NoVisualTokensError(
                "hae with ddes=False evicts visual tokens only, and this prompt has no image or video; add one, or use "
                "ddes=True"
            )
        if self.ddes and self.budget is not None and self.compress_prompt:
            steady = request.budget_tokens(self.budget, steady=True)
            check_room("hae", steady, prompt.lengths, self.sink + self.recent, "sink + recent")
        return HAEState(prompt.real)

    def prefill(self, view: PrefillView) -> Decision:
        """Run DAP in the first layer, apply its choice to all layers, and initialize the scores of DDES."""
        state: HAEState = view.state
        stream = None
        if view.compressed_idx == 0:
            pruned = self._prune(view) if self.dap else torch.zeros_like(view.prompt.real)
            state.keep = view.prompt.real & ~pruned
            state.figures["evicted_visual"] = pruned.sum(-1).tolist()
            if self.drop_hidden_states:
                stream = state.keep
            if self.ddes:
                lengths = state.keep.sum(-1).cpu()
                state.steady, state.recent = self._steady(view, lengths)
                state.longer = bool((lengths > state.steady).any())
        keep = (state.keep.gather(1, view.positions) & view.prompt.real)[:, None]
        if not self.ddes or state.steady is None or state.recent is None:
            return Decision(keep=keep, stream=stream)
        keep = keep.expand(-1, view.keys.shape[1], -1)
        sums = prompt_scores(view, self.prefill_rows)
        if state.longer:
            before = int(keep.sum())
            keep = self._bin.shrink(sums, keep, state.steady, state.recent)
            state.figures["evicted_prompt"] = state.figures.get("evicted_prompt", 0) + before - int(keep.sum())
        state.bins.add_layer(state.steady, state.recent)
        return Decision(keep=keep, stream=stream, fields=self._bin.fields(sums))

    def _prune(self, view: PrefillView) -> Tensor:
        """Return the visual tokens that DAP evicts, by the first layer: bool [B, C]."""
        visual = view.prompt.visual
        if not bool(visual.any()):
            return torch.zeros_like(visual)
        # Text before the first image cannot attend to it, so all text rows give the same sums as the rows after it.
        rows, valid = scores.text_rows(view.prompt, max_rows=None)
        given = view.query, view.keys, rows, valid, view.scaling, view.visible
        stats = scores.head_mean_stats(*given)
        if self.statistics:
            sparse = scores.sparsity(*given, (visual, view.prompt.text))
            spread = [_mean(stats.variance, columns) for columns in (visual, view.prompt.text)]
            view.state.figures |= {
                "visual_sparsity": sparse[0].tolist(), "text_sparsity": sparse[1].tolist(),
                "visual_variance": spread[0].tolist(), "text_variance": spread[1].tolist(),
            }  # fmt: skip
        return self.redundant(stats.sums, stats.maxima, stats.variance, visual)

    def redundant(self, sums: Tensor, maxima: Tensor, variance: Tensor, visual: Tensor) -> Tensor:
        """Return the visual tokens that DAP evicts: bool [B, C].

        Args:
            sums, maxima, variance: [B, C], a_j, m_j and v_j of every column; only visual columns are read.
            visual: bool [B, C].
        """
        total = sums.masked_fill(~visual, 0).sum(-1, keepdim=True)
        count = visual.sum(-1, keepdim=True)
        if self.target_visual_tokens is not None:
            target = self.target_visual_tokens
            wanted = [target if isinstance(target, Integral) else round(target * n) for n in count[:, 0].tolist()]
            kept = keep_top(sums.masked_fill(~visual, -torch.inf), torch.tensor(wanted, device=sums.device))
            return visual & ~kept
        gone = visual.clone()
        if self.criterion != "variance":
            r = (RELATIVE_R if self.relative else R) if self.r is None else self.r
            share = r / count.clamp_min(1) if self.relative else r
            gone &= sums < share * total  # Eq. 1-2
            if self.alpha is not None:
                gone &= maxima < self.alpha  # Eq. 3
        if self.criterion != "dual":
            visible = variance.masked_fill(~visual, torch.nan)
            limit = torch.nanquantile(visible, self.variance_quantile, dim=-1, keepdim=True)
            gone &= variance < limit
        if self.c is not None:
            least = variance if self.criterion == "variance" else sums
            gone = keep_top((-least).masked_fill(~gone, -torch.inf), torch.full_like(count[:, 0], self.c))
        return gone

    def decode(self, view: DecodeView) -> Decision | None:
        """Run one step of DDES."""
        return self._bin.step(view, view.state.bins)

    def results(self, view: ResultView) -> Results:
        """Return what DAP and DDES evicted, at prefill and while decoding, and the steady size and peak of DDES."""
        state: HAEState = view.state
        return Results({**state.figures, **state.bins.figures()})

    def _steady(self, view: PrefillView, length: Tensor) -> tuple[Tensor, Tensor]:
        """Return l and the number of protected newest tokens, [B] each; length: [B], prompt lengths after DAP."""
        steady = length
        if self.budget is not None:
            steady = view.budget_tokens(self.budget, steady=True).cpu()
            if not self.compress_prompt:
                steady = torch.maximum(steady, length)
        steady = steady.clamp_min(max(self.sink + self.recent, 1))
        return steady, torch.full_like(steady, self.recent)


def _mean(values: Tensor, columns: Tensor) -> Tensor:
    """Return the mean over the marked columns of each sequence, [B, C] -> [B]; 0 if none is marked."""
    return values.masked_fill(~columns, 0).sum(-1) / columns.sum(-1).clamp_min(1)

"""HAE: Hierarchical Adaptive Eviction (arXiv 2602.02197).

DAP (dual-attention pruning, `dap.py`) prunes visual tokens of the prompt by the attention from text tokens in one
layer. DDES (dynamic decoding eviction strategy, `ddes.py`, `shared_bin.py`) evicts text and visual tokens while
decoding, through a recycle bin.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor

from foveakv.core.columns import newest
from foveakv.errors import MethodError, NoVisualTokensError
from foveakv.methods.base import Method, ModelFacts
from foveakv.methods.checks import check_room
from foveakv.methods.contexts import at_view, in_context, stored_prompt
from foveakv.methods.dap import DAP, TextStats, described, room_for_visual, text_stats
from foveakv.methods.ddes import RecycleBin, accumulated
from foveakv.methods.hae_options import check_options, of_stages
from foveakv.methods.hae_presets import PRESETS
from foveakv.methods.hae_state import HAEState, Sizes, Waiting, newest_kept
from foveakv.methods.hae_steady import SteadySize
from foveakv.methods.presets import Presets
from foveakv.methods.prompt_scores import prompt_scores
from foveakv.methods.results import Results
from foveakv.methods.score_layers import CALIBRATED, Chosen, choose_layers, named_layers
from foveakv.methods.shared_bin import shared_step
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

ALPHA = 0.001
_ALL, _TEXT = Observes(queries="all", attention_sum=True), Observes(queries="text")


@dataclass
class HAE(Presets, Method):
    """Prune visual tokens by one layer's text attention; while decoding, evict `recycle_bin_size` tokens at once.

    DAP: A[i, j] is the attention from text token i to visual token j in the deciding layer, averaged over heads (the
    paper does not state how heads are combined). Visual token j is evicted from every layer if a_j = sum_i A[i, j]
    < r * sum_j a_j (Eq. 1-2) and m_j = max_i A[i, j] < alpha (Eq. 3). At most `c` tokens are evicted (Def. 1), those
    with the lowest a_j.

    DDES: tokens accumulate attention (Eq. 5). While decoding, l <= tokens < l + D holds (Def. 2), and the D tokens with
    the lowest scores are evicted at once (Eq. 4). l is `budget` and D is `recycle_bin_size`.

    Args:
        dap, ddes: the two stages; disable one to run the other alone.
        score_layer: the deciding layer: its index among the compressed layers, a share of the depth, several layers
            (averaged, decided at the last of them), "calibrated" (found by a calibration file of the model, else half
            of the depth), or a calibration file. 0 in the paper.
        rows: "mean" divides a_j by the number of text rows that can see token j, which for one image is the paper's
            rule; "sum" is Eq. 1 to the letter.
        early_layers: what layers before the deciding one keep: "wait" holds all tokens until it has decided, "first"
            prunes by layer 0's scores at once, "own" by each layer's own (not in the paper).
        r: share in Eq. 2; None = 0.7 with `relative`, else 0.0012 (the paper's value for LLaVA-1.5).
        relative: r is a multiple of the uniform share 1 / V, and so independent of the number V of visual tokens (not
            in the paper).
        alpha: threshold of Eq. 3; None = no individual test (not in the paper).
        c: the most visual tokens that the tests evict per sequence; None = no limit.
        target_visual_tokens: number of visual tokens to keep per sequence, or their share, those with the highest a_j
            (with criterion="variance" the highest variance); replaces the tests (not in the paper).
        criterion: "dual" (the paper's equations), "variance" (tokens whose variance over text rows is below the
            `variance_quantile` of the sequence's visual tokens), or "dual+variance" (both must hold).
        value_norm: multiply a_j, and the prompt's scores of DDES, by the norm of the token's value (not in the paper).
        drop_hidden_states: also prune these tokens from the residual stream after the deciding layer, so that later
            layers do not compute them (not stated in the paper).
        budget: steady size l: a share of the prompt, tokens per head, or bytes; None = the length of the prompt after
            DAP. Up to `recycle_bin_size` - 1 more tokens are stored before a flush.
        compress_prompt: evict from a longer prompt until l tokens are left (not stated in the paper); False sets l to
            the length of such a prompt.
        prompt_ranking: by which scores: "deciding" keeps all text and the visual tokens that the deciding layer ranks
            highest, where text leaves two fifths of l to them. Else, and with "own", every layer ranks all tokens by
            its own scores of DDES (not in the paper).
        recycle_bin_size: D.
        candidates: which tokens DDES may evict: "prompt" (those left after the prefill, S_1 of Eq. 4, while they last)
            or "all", decoded tokens included.
        scores: "own": every layer evicts by its own scores; "shared": the prompt is reduced by the deciding layers'
            scores and decoding evicts by the sums over all layers, so that all layers store the same tokens (not in the
            paper).
        mode, restore, score, frequency_weight: which tokens a flush evicts, see `ddes.RecycleBin`.
        recent, sink: number of newest and oldest tokens that are never evicted; 0 in the paper. recent=None is 4, at
            most a quarter of l.
        per_head_scores: rank tokens per KV head; False sums scores over heads (not stated in the paper).
        prefill_rows: prompt queries that count for the scores: "all", or a number of sampled rows (not in the paper).
        statistics: also measure the deciding layer's attention to visual and text tokens: the share of probabilities
            up to 1e-4 (the paper's sparsity) and the mean variance.

    `results` has `evicted_visual` (tokens that left all layers at the prompt, per sequence), `score_layers`,
    `evicted_prompt` (slots evicted to reduce the prompt to l), the statistics, and the figures of `ddes.BinState`.
    """

    budget: float | int | str | None = None
    dap: bool = True
    ddes: bool = True
    score_layer: int | float | str | tuple[int, ...] = CALIBRATED
    rows: Literal["mean", "sum"] = "mean"
    early_layers: Literal["wait", "first", "own"] = "wait"
    r: float | None = None
    alpha: float | None = ALPHA
    relative: bool = True
    c: int | None = None
    target_visual_tokens: int | float | None = None
    criterion: Literal["dual", "variance", "dual+variance"] = "dual"
    variance_quantile: float = 0.6
    value_norm: bool = True
    drop_hidden_states: bool = False
    recycle_bin_size: int = 64
    candidates: Literal["all", "prompt"] = "all"
    scores: Literal["own", "shared"] = "own"
    mode: Literal["rerank", "mark"] = "rerank"
    restore: bool = True
    score: Literal["attention", "frequency+importance"] = "attention"
    frequency_weight: float = 0.5
    recent: int | None = None
    sink: int = 0
    compress_prompt: bool = True
    prompt_ranking: Literal["deciding", "own"] = "deciding"
    per_head_scores: bool = False
    prefill_rows: Literal["all"] | int = "all"
    statistics: bool = False
    _chosen: Chosen | None = field(default=None, init=False, repr=False, compare=False)

    name: ClassVar[str] = "hae"
    presets: ClassVar[dict[str, dict[str, Any]]] = PRESETS

    @classmethod
    def preset(cls, name: str, **options: Any) -> Self:
        """Return the paper's settings, for one of its models, overridden by `options`.

        Settings of a stage that the options disable are left out.

        Raises:
            MethodError: there is no such preset.
        """
        return cls(**{**of_stages(cls.preset_options(name), options), **options})

    def __post_init__(self) -> None:
        check_options(self)
        self._rules.validate(self.name)
        self._bin.validate(self.name)

    # ---- declarations for the engine

    @cached_property
    def _rules(self) -> DAP:
        return DAP(
            self.r, self.alpha, self.relative, self.c, self.target_visual_tokens, self.criterion, self.variance_quantile
        )

    @cached_property
    def _bin(self) -> RecycleBin:
        return RecycleBin(
            size=self.recycle_bin_size, mode=self.mode, restore=self.restore, score=self.score,
            frequency_weight=self.frequency_weight, per_head=self.per_head_scores, sink=self.sink,
        )  # fmt: skip

    @cached_property
    def _steady(self) -> SteadySize:
        return SteadySize(self._bin, self.budget, self.recent, self.sink, self.compress_prompt, self.candidates)

    def for_model(self, model: ModelFacts) -> HAE:
        """Find the deciding layer in the model; see `score_layer`."""
        made = copy.copy(self)
        if self._decides_late:
            made._chosen = choose_layers(self.name, "score_layer", self.score_layer, model)
        return made

    @property
    def _decides_late(self) -> bool:
        """Whether anything depends on the deciding layer."""
        return self.dap or self.scores == "shared"

    @property
    def _layers(self) -> tuple[int, ...]:
        """The scoring layers; the last one decides."""
        if not self._decides_late:
            return (0,)
        layers = named_layers(self.score_layer) if self._chosen is None else self._chosen.layers
        if layers is None:
            raise MethodError(f"hae: score_layer={self.score_layer!r} depends on the model; call for_model first")
        return layers

    @property
    def granularity(self) -> Granularity:
        """One set of tokens for all layers unless layers decide for themselves; see `scores`, `early_layers`."""
        if self.ddes and self.scores == "own":
            return "head" if self.per_head_scores else "layer"
        return "token" if self.early_layers == "wait" else "layer"

    @property
    def observes(self) -> Observes:
        """Text queries for DAP; for DDES all prompt queries and the attention sum of every decode step."""
        return _ALL if self.ddes else _TEXT

    @property
    def decides(self) -> tuple[When, ...]:
        """Evicts at the end of the prompt and, with DDES, while decoding."""
        return ("prefill", "decode") if self.ddes else ("prefill",)

    @property
    def prunes_after(self) -> int | None:
        """The deciding layer, with `drop_hidden_states`; 0 as long as the model is unknown."""
        if not self.drop_hidden_states:
            return None
        known = self._chosen is not None or named_layers(self.score_layer) is not None
        return self._layers[-1] if known else 0

    def needs_queries(self, compressed_idx: int) -> bool:
        """True for layers that score: for DAP the scoring layers, for DDES all of them unless scores are shared."""
        return (
            (self.ddes and self.scores == "own") or compressed_idx in self._layers or self._scores_early(compressed_idx)
        )

    def _scores_early(self, idx: int) -> bool:
        """Whether a layer before the deciding one prunes by its own statistics."""
        early = self.dap and idx < self._layers[-1]
        return early and (self.early_layers == "own" or (self.early_layers == "first" and idx == 0))

    # ---- prefill

    def begin(self, request: PromptView) -> HAEState:
        """Check that the prompt has visual tokens to evict and that the budget holds the protected tokens."""
        prompt = request.prompt
        if not self.ddes and not prompt.has_visual:
            raise NoVisualTokensError(
                "hae with ddes=False evicts visual tokens only, and this prompt has no image or video; add one, or use "
                "ddes=True"
            )
        self._check_room(request)
        return HAEState.of(request)

    def continue_context(self, request: PromptView, state: State | None) -> HAEState:
        """Find the visual tokens that DAP judges now: those that a text token of the block comes after."""
        self._check_room(request)
        return HAEState.of(request, state if isinstance(state, HAEState) else None)

    def _check_room(self, request: PromptView) -> None:
        if self.ddes and self.budget is not None and self.compress_prompt:
            steady = request.budget_tokens(self.budget, steady=True)
            check_room("hae", steady, request.prompt.lengths, self.sink + (self.recent or 0), "sink + recent")

    def prefill(self, view: PrefillView) -> Decision:
        """Score, decide in the deciding layer, apply its choice to all layers, and initialize DDES."""
        state: HAEState = view.state
        idx, deciding = view.compressed_idx, self._layers[-1]
        redundant = self._score(view)
        if idx < deciding:
            return self._before(view, redundant)
        stream, earlier = None, None
        if idx == deciding:
            real = view.request.prompt.real
            gone = torch.zeros_like(real) if redundant is None else redundant
            state.keep = real & ~gone
            state.count("evicted_visual", gone.sum(-1).tolist())
            stream = state.keep if self.drop_hidden_states and view.stored is None else None
            if self.ddes:
                state.sizes = self._steady.sizes(view, self._candidates(view, state.keep)[:, 0])
            earlier = self._settle_earlier(view)
        decision = self._kept(view, state.keep, state.sizes)
        decision.stream, decision.earlier = stream, earlier
        return decision

    def _score(self, view: PrefillView) -> Tensor | None:
        """Compute what a layer's scores are needed for; return the visual tokens that DAP evicts by them, bool [B, N].

        None: the layer does not decide, or there is nothing to evict.
        """
        state, idx, layers = view.state, view.compressed_idx, self._layers
        if self.scores == "shared" and idx in layers:
            state.add_shared_sums(self._prompt_scores(view))
        early = self._scores_early(idx)
        if not self.dap or not (early or idx in layers) or not view.request.prompt.has_visual:
            return None
        measured = text_stats(view, self.rows, value_norm=self.value_norm)
        stats = TextStats(*(in_context(each, view) for each in measured))
        found = self._redundant(view, stats) if early else None
        if idx in layers:
            state.add_stats(stats)
        if idx != layers[-1]:
            return found
        mean = TextStats(*(each / len(layers) for each in state.stats))
        state.stats = []
        if self.statistics:
            state.figures |= described(view, measured)
        return self._redundant(view, mean)

    def _redundant(self, view: PrefillView, stats: TextStats) -> Tensor:
        """Return the visual tokens that DAP evicts, and those that do not fit into the budget: bool [B, N]."""
        state, prompt = view.state, stored_prompt(view)
        gone = self._rules.redundant(stats, prompt.visual & state.judge)
        fits = self.prompt_ranking == "deciding" and self.compress_prompt and self.target_visual_tokens is None
        if not (fits and self.ddes and self.budget is not None):
            return gone
        steady, real = view.budget_tokens(self.budget, steady=True), prompt.real
        protected = newest(real, newest_kept(steady, self.recent, self.sink)) | (real & (real.cumsum(-1) <= self.sink))
        visual = prompt.visual & state.ranked & ~protected
        return gone | self._rules.beyond(stats, visual & ~gone, room_for_visual(steady, prompt, visual))

    def redundant(self, sums: Tensor, maxima: Tensor, variance: Tensor, visual: Tensor) -> Tensor:
        """Return the visual tokens that DAP evicts: bool [B, C].

        Args:
            sums, maxima, variance: [B, C], a_j, m_j and v_j of every column; only visual columns are read.
            visual: bool [B, C].
        """
        return self._rules.redundant(TextStats(sums, maxima, variance), visual)

    def _before(self, view: PrefillView, redundant: Tensor | None) -> Decision:
        """Decide for a layer before the deciding one."""
        state: HAEState = view.state
        if self._waits(view):
            if not self.ddes or self.scores == "shared":
                return Decision()
            sums = self._prompt_scores(view)
            state.waiting.append(Waiting(sums, view.candidates, view.positions))
            return Decision(fields=self._bin.fields(sums))
        real = view.request.prompt.real
        keep = real if redundant is None else real & ~redundant
        if self.early_layers == "first" and view.request.prompt.has_visual:
            keep = state.first = keep if state.first is None else state.first
        return self._kept(view, keep)

    def _settle_earlier(self, view: PrefillView) -> list[Decision] | None:
        """Decide for the layers that have waited; with shared scores also reduce `state.keep` to the steady size."""
        state: HAEState = view.state
        idx, sizes = view.compressed_idx, state.sizes
        keep = self._candidates(view, state.keep)  # where layers wait, they store the same tokens or have own scores
        if self.scores == "shared" and sizes is not None:
            keep = self._steady.shared(view, keep[:, :1], sizes, len(view.request.layers) / len(self._layers))
        elif not self._waits(view):
            return None
        elif sizes is not None:
            waiting, state.waiting = state.waiting, []
            return [self._steady.settled(view, each, sizes) for each in waiting]
        return [Decision(keep=keep)] * idx

    def _waits(self, view: PrefillView) -> bool:
        """Whether layers before the deciding one store all tokens until it has decided."""
        return self.scores == "shared" or (self.early_layers == "wait" and view.request.prompt.has_visual)

    def _kept(self, view: PrefillView, columns: Tensor, sizes: Sizes | None = None) -> Decision:
        """Keep columns [B, N] of the context in a layer, reduced to the steady size by its own scores.

        sizes: of the deciding layer, for the later layers of a first prompt.
        """
        state: HAEState = view.state
        keep = self._candidates(view, columns)
        if not self.ddes or self.scores == "shared":
            return Decision(keep=keep)
        if sizes is None or view.stored is not None:
            sizes = self._steady.sizes(view, keep[:, 0])
        sums = self._prompt_scores(view)
        return Decision(keep=self._steady.reduced(state, sums, keep, sizes), fields=self._bin.fields(sums))

    def _prompt_scores(self, view: PrefillView) -> Tensor:
        return accumulated(view, prompt_scores(view, self.prefill_rows, value_norm=self.value_norm))

    def _candidates(self, view: PrefillView, columns: Tensor) -> Tensor:
        """Return the columns [B, N] that a layer may keep: bool [B, 1 or H, C]."""
        return at_view(columns, view)[:, None] & view.candidates

    # ---- decoding, results

    def decode(self, view: DecodeView) -> Decision | None:
        """Run one step of DDES."""
        state: HAEState = view.state
        if state.shared is not None:
            return shared_step(view, state.shared, self.recycle_bin_size, self.sink)
        return self._bin.step(view, state.bins)

    def results(self, view: ResultView) -> Results:
        """Return what DAP and DDES evicted, at prefill and while decoding, and the steady size and peak of DDES."""
        state: HAEState = view.state
        bins = state.bins if state.shared is None else state.shared
        figures, notes = {**state.figures, **bins.figures()}, tuple[str, ...]()
        if self._decides_late:
            figures["score_layers"] = list(self._layers)
            if self._chosen is not None and self._chosen.source:
                notes = (f"hae: layer {', '.join(map(str, self._layers))} decides; from {self._chosen.source}",)
        return Results(figures, notes=notes)

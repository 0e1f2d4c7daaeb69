"""HybridKV: prune the cache of static heads, retrieve chunks for dynamic heads (arXiv 2604.05887)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from foveakv.core.allocation import allocate_heads
from foveakv.core.attention_stats import text_rows, topk_attention, window_scores
from foveakv.core.budget import Geometry, digest_bytes, parse_budget
from foveakv.core.columns import from_end
from foveakv.core.selection import keep_top
from foveakv.errors import MethodError
from foveakv.methods.base import Method
from foveakv.methods.checks import choice, flag, number, share, whole_number
from foveakv.methods.results import HeadMaps, Results
from foveakv.methods.snapkv import shrunk_window, window_tokens
from foveakv.methods.views import (
    Decision,
    Observes,
    Offload,
    PrefillView,
    PromptEndView,
    PromptView,
    ResultView,
    State,
    When,
)

PRESETS: dict[str, dict[str, Any]] = {
    # The paper's settings: budgets rounded to the nearest power of two, digests in addition to the budget.
    "paper": {
        "theta": 0.9,
        "rho": 0.75,
        "chunk_size": 8,
        "rounding": "nearest",
        "count_digests": False,
        "window_share": 1.0,
    },
    # For small models and prompts of a few hundred tokens (docs/evidence.md): nearly all heads score above 0.9,
    # questions are shorter than 32 tokens, images are a few tokens wide, and float32 digests use up a small budget.
    "small": {"theta_quantile": 0.7, "window": 8, "chunk_size": 4, "digest_dtype": "int8"},
}


@dataclass
class HybridKVState(State):
    """State of one request.

    rows: text rows int64 [B, n], and bool [B, n], which of them count. k: of every sequence, for Eq. 3. Per layer,
    during prefill: scores S [B, H], static [B, H], window_scores [B, H, C] of static heads. After prefill: heads, and
    int64 [B] slots of the budget minus digests (total) and before rounding and trimming (nominal).
    """

    rows: tuple[Tensor, Tensor]
    k: list[int]
    scores: list[Tensor] = field(default_factory=list)
    static: list[Tensor] = field(default_factory=list)
    window_scores: list[Tensor | None] = field(default_factory=list)
    heads: HeadMaps | None = None
    total: Tensor | None = None
    nominal: Tensor | None = None


@dataclass
class HybridKV(Method):
    """Classify heads as static or dynamic, then prune the cache of static heads and retrieve chunks for dynamic heads.

    1. Head score, Eq. 2 and 3: S[l, h] = mean over the prompt's text rows of the sum of the k highest attention
       probabilities. A head is static iff S >= theta, per sequence, layer and KV head.
    2. Budgets, Eq. 4 and 5: `foveakv.core.allocation.allocate_heads`.
    3. Static heads, App. A: keep text first, then the last `window` tokens, then the visual tokens that the window
       attends to most. This happens once, after the prompt.
    4. Dynamic heads, App. A: their keys and values are offloaded in chunks of 8 tokens. Every step attends to the
       chunks whose mean key scores highest, until the budget is full.

    Not stated in the paper; we use
    - k = ceil(0.05 C), as in its pilot study, alpha = 0.1 and window = 32;
    - the mean of S over the query group, and text rows after the first visual token only, at most 64 of them;
    - budgets rounded down to a power of two;
    - digests of rotated keys, and as the score of a chunk the maximum over the query group (and over the new tokens, if
      there are several) of the softmax over chunks;
    - decoded tokens in addition to the budget.
    A dynamic head whose budget holds no chunk besides the incomplete last one keeps its newest tokens and retrieves
    nothing.

    Args:
        budget: slots of the prompt kept on the device, over all heads: 0.1, "10%", 1024 (tokens per head) or "1GB".
        count_digests: count digests (1/16 of the dynamic heads' KV at chunks of 8) towards the budget, so that the
            device stores no more than the budget; at 10% with all heads dynamic they are more than half of it. False
            stores them in addition to the budget, as the paper's figures do.
        theta: score S from which a head is static.
        theta_quantile: replaces `theta` by this quantile of the sequence's scores. No layer can be pruned before all
            layers have been read, so the peak memory is that of a full cache.
        rho: mean budget of dynamic heads as a share of the mean budget, Eq. 4.
        alpha: share of the static budget that is split evenly, a in Eq. 5.
        window: tokens at the end of the prompt that static heads keep and whose attention scores the other tokens.
        window_share: the largest share of a static head's budget for the window (not in the paper, which keeps the
            whole window: 1).
        chunk_size: tokens per chunk.
        k_ratio: k of the head score as a share of the prompt.
        text_rows: "after_visual" (text after the first visual token) or "all".
        max_text_rows: the most rows for the head score: the last ones, and evenly spaced earlier ones.
        rounding: how dynamic budgets are rounded to a power of two, "down" or "nearest" (the paper's). The total budget
            holds in both cases: slots added by "nearest" are taken from static heads.
        spend_rest: give slots that rounding down frees to static heads; False leaves them unused.
        min_budget: slots that every head gets at least, if the total allows it; None = `window`.
        store: where the chunks of dynamic heads are stored: "host", "device" (saves no memory) or "disk" (a file).
        store_dir: directory of that file; None = the system's temporary directory, which may be in memory.
        digest_dtype: how digests are stored: "model" (the model's dtype), "bf16", or "int8" with one scale per head and
            channel. Fewer bits leave more of the budget for chunks.
        classify: "auto", or "all_static" / "all_dynamic" regardless of the scores.
        head_level: False gives all static heads the same budget.
        type_level: False gives static and dynamic heads the same mean budget.

    `results` has scores, classes and budgets per head.
    """

    budget: float | int | str = 0.1
    theta: float = 0.9
    theta_quantile: float | None = None
    rho: float = 0.75
    alpha: float = 0.1
    window: int = 32
    window_share: float = 0.5
    chunk_size: int = 8
    k_ratio: float = 0.05
    text_rows: Literal["after_visual", "all"] = "after_visual"
    max_text_rows: int = 64
    rounding: Literal["down", "nearest"] = "down"
    spend_rest: bool = False
    min_budget: int | None = None
    store: Literal["host", "device", "disk"] = "host"
    store_dir: str | None = None
    digest_dtype: Literal["model", "bf16", "int8"] = "model"
    classify: Literal["auto", "all_static", "all_dynamic"] = "auto"
    head_level: bool = True
    type_level: bool = True
    count_digests: bool = True

    name: ClassVar[str] = "hybridkv"

    @classmethod
    def preset(cls, name: str, **options: Any) -> HybridKV:
        """Return a method with the settings of a preset (see `PRESETS`), overridden by `options`.

        Raises:
            MethodError: there is no such preset.
        """
        if name not in PRESETS:
            raise MethodError(f"HybridKV has no preset {name!r}; choose one of {', '.join(PRESETS)}")
        return cls(**{**PRESETS[name], **options})

    def __post_init__(self) -> None:
        parse_budget(self.budget)
        share(self.name, "theta", self.theta, meaning="the head score from which a head is static")
        if self.theta_quantile is not None:
            share(self.name, "theta_quantile", self.theta_quantile, meaning="the share of heads that become dynamic")
        share(self.name, "window_share", self.window_share, above_zero=True, meaning="of the budget, for the window")
        share(self.name, "alpha", self.alpha, meaning="the share of the static budget that is split evenly")
        share(self.name, "k_ratio", self.k_ratio, meaning="of the prompt's tokens")
        number(self.name, "rho", self.rho, 0, meaning="1: dynamic heads get the mean budget")
        for option in ("window", "chunk_size", "max_text_rows"):
            whole_number(self.name, option, getattr(self, option), 1)
        if self.min_budget is not None:
            whole_number(self.name, "min_budget", self.min_budget, 1, "or None: the window")
        for option, known in _CHOICES.items():
            choice(self.name, option, getattr(self, option), known)
        for option in ("head_level", "type_level", "spend_rest", "count_digests"):
            flag(self.name, option, getattr(self, option))
        if self.store_dir is not None and self.store != "disk":
            raise MethodError(f'hybridkv: store_dir is used by store="disk" only; got store={self.store!r}')

    @property
    def observes(self) -> Observes:
        """All prompt queries."""
        return Observes(queries="all")

    @property
    def decides(self) -> tuple[When, ...]:
        """Evicts at the end of the prompt; dynamic heads read chunks in every step."""
        if self.classify == "all_static":
            return "prefill", "after_prefill"
        return "prefill", "after_prefill", "read"

    @property
    def _late(self) -> bool:
        """Whether heads can be classified only after all layers have been read."""
        return self.theta_quantile is not None and self.classify == "auto"

    # ---- prefill

    def begin(self, request: PromptView) -> HybridKVState:
        """Select the text rows and compute k of every sequence."""
        prompt = request.prompt
        share = Fraction(repr(float(self.k_ratio)))  # no rounding error: 0.05 * 140 is 7
        k = [max(1, math.ceil(share * length)) for length in prompt.lengths.tolist()]
        return HybridKVState(text_rows(prompt, self.text_rows == "after_visual", self.max_text_rows), k)

    def prefill(self, view: PrefillView) -> Decision:
        """Score the heads of one layer and classify them, and offload the chunks of its dynamic heads."""
        prompt = view.prompt
        state: HybridKVState = view.state
        rows, valid = state.rows
        given = view.query, view.keys, rows, valid, view.scaling, view.visible
        scores = topk_attention(*given, state.k, fused=view.fused)  # [B, H]
        static = torch.ones_like(scores, dtype=torch.bool) if self._late else self._static(scores)
        state.scores.append(scores)
        state.static.append(static)
        window = None
        if bool(static.any()):
            window = window_scores(view.query, view.keys, self.window, view.scaling, view.visible, prompt.real)
        state.window_scores.append(window)
        # Dynamic heads also keep one complete chunk, in case their budget is too small to retrieve.
        incomplete = prompt.lengths % self.chunk_size
        keep = static[..., None] | (from_end(prompt.real) <= (incomplete + self.chunk_size)[:, None])[:, None]
        return Decision(keep=keep, offload=self._offload(~static))

    def after_prefill(self, view: PromptEndView) -> list[Decision]:
        """Allocate a budget to every head and reduce all layers to it."""
        request, state = view.request, view.state
        geometry, prompt = request.geometry, request.prompt
        scores = torch.stack(state.scores, 1).cpu()  # [B, L, H]
        static = self._static(scores) if self._late else torch.stack(state.static, 1).cpu()
        totals = request.budget_slots(self.budget).tolist()
        if self.count_digests:
            totals = self._minus_digests(totals, static, geometry)
        minimum = self.window if self.min_budget is None else self.min_budget
        parts = [
            allocate_heads(
                scores[b], static[b], context, totals[b], self.rho, self.alpha,
                min_budget=minimum, chunk=context % self.chunk_size + self.chunk_size, rounding=self.rounding,
                head_level=self.head_level, type_level=self.type_level, spend_rest=self.spend_rest,
            )
            for b, context in enumerate(prompt.lengths.tolist())
        ]  # fmt: skip
        budgets = torch.stack([part.budgets for part in parts])  # [B, L, H]
        settled = [
            self._settle(prompt.real, prompt.text, static[:, layer], budgets[:, layer], window)
            for layer, window in enumerate(state.window_scores)
        ]
        state.total = torch.tensor(totals)
        state.nominal = torch.tensor([part.nominal for part in parts])
        state.heads = HeadMaps(scores, static, budgets, torch.stack([slots for _, slots in settled], 1))
        state.scores, state.static, state.window_scores = [], [], []
        return [decision for decision, _ in settled]

    def results(self, view: ResultView) -> Results:
        """Return shares and totals over the sequences, the maps per head, and a note if a window was shrunk."""
        state: HybridKVState = view.state
        heads = state.heads
        if heads is None or state.total is None or state.nominal is None:
            return Results()
        figures = {
            "static_share": float(heads.static.float().mean()),
            "budget_slots": int(state.total.sum()),
            "nominal_slots": int(state.nominal.sum()),
            "slots": int(heads.slots.sum()),
            "digest_bytes": view.digest_bytes,
        }
        lengths = view.request.prompt.lengths.cpu()[:, None, None]
        kept = window_tokens(heads.budgets, self.window, self.window_share)
        evicts = heads.static & (heads.budgets < lengths)
        small = evicts & (kept < heads.budgets.clamp_max(self.window))
        notes = (shrunk_window(int(kept[small].min()), self.window),) if bool(small.any()) else ()
        return Results(figures, notes=notes, heads=heads)

    def _minus_digests(self, totals: list[int], static: Tensor, geometry: Geometry) -> list[int]:
        """Return the slots of the budget minus the dynamic heads' digests, at least one slot per head.

        Nothing is subtracted from a budget of the whole prompt: all chunks are on the device, without digests.
        """
        each, once = digest_bytes(self.digest_dtype, geometry.head_dim, geometry.itemsize)
        slot = (geometry.head_dim + geometry.value_dim) * geometry.itemsize
        left = []
        for total, context, dynamic in zip(
            totals, geometry.contexts, (~static).flatten(1).sum(-1).tolist(), strict=True
        ):
            digests = math.ceil(dynamic * (int(context) // self.chunk_size * each + once) / slot)
            whole = total >= int(context) * geometry.heads
            left.append(total if whole else max(total - digests, geometry.heads))
        return left

    def _static(self, scores: Tensor) -> Tensor:
        """Return which heads are static, from S: [B, H] of one layer or [B, L, H] of all."""
        if self.classify != "auto":
            return torch.full_like(scores, self.classify == "all_static", dtype=torch.bool)
        if self.theta_quantile is None:
            return scores >= self.theta
        threshold = scores.flatten(1).double().quantile(self.theta_quantile, dim=1)
        return scores.double() >= threshold.view(-1, *[1] * (scores.dim() - 1))

    def _offload(self, dynamic: Tensor) -> Offload | None:
        """Return the offload of the dynamic heads' complete chunks; dynamic: bool [B, H]."""
        if not bool(dynamic.any()):
            return None
        return Offload(dynamic, self.chunk_size, self.store, self.store_dir, "mean", self.digest_dtype)

    def _settle(
        self, real: Tensor, text: Tensor, static: Tensor, budgets: Tensor, window: Tensor | None
    ) -> tuple[Decision, Tensor]:
        """Reduce one layer to its budgets: prune static heads, and set the number of chunks that dynamic heads read.

        Args:
            real, text: bool [B, C].
            static, budgets: bool and int64 [B, H], on the CPU.
            window: scores [B, H, C] of static heads.

        Returns:
            The decision, and the slots on the device, chosen chunks included: int64 [B, H] on the CPU.
        """
        device = real.device
        static, budgets, lengths = static.to(device), budgets.to(device), real.sum(-1)
        # Dynamic heads keep the incomplete chunk; if no other chunk fits the budget, they keep their newest tokens.
        complete, incomplete = (lengths // self.chunk_size)[:, None], (lengths % self.chunk_size)[:, None]
        chunks = ((budgets - incomplete).clamp_min(0) // self.chunk_size).masked_fill(static, 0)  # [B, H]
        keep = from_end(real)[:, None] <= torch.where(chunks > 0, incomplete, budgets)[..., None]
        if window is not None:
            kept = text_prior_keep(window, text, real, budgets, self.window, self.window_share)
            keep = torch.where(static[..., None], kept, keep)
        slots = (keep & real[:, None]).sum(-1) + torch.minimum(chunks, complete) * self.chunk_size
        offload = self._offload(~static) if self._late else None
        return Decision(keep=keep, offload=offload, chunks=chunks), slots.cpu()


_CHOICES = {
    "text_rows": ("after_visual", "all"),
    "rounding": ("down", "nearest"),
    "store": ("host", "device", "disk"),
    "digest_dtype": ("model", "bf16", "int8"),
    "classify": ("auto", "all_static", "all_dynamic"),
}


def text_prior_keep(
    scores: Tensor, text: Tensor, real: Tensor, budgets: Tensor, window: int, window_share: float = 1.0
) -> Tensor:
    """Select the columns that static heads keep (arXiv 2604.05887, App. A).

    Text comes first, then the last `window` columns, then the rest by score. If text alone exceeds budget - window, the
    window and the best-scored text are kept. In either case the order of selection is window, text, rest.

    Not stated in the paper; we keep the newest columns if the budget is below the window, give the window at most
    `window_share` of the budget, and count audio with the rest.

    Args:
        scores: [B, H, C].
        text, real: bool [B, C].
        budgets: int64 [B, H].

    Returns:
        bool [B, H, C] with min(budget, real columns) marks per head.
    """
    recent = from_end(real)[:, None] <= window_tokens(budgets, window, window_share)[..., None]
    earlier = real[:, None] & ~recent
    left = budgets - recent.sum(-1)
    best_text = keep_top(scores.masked_fill(~(earlier & text[:, None]), -torch.inf), left)
    left = left - best_text.sum(-1)
    best_rest = keep_top(scores.masked_fill(~(earlier & ~text[:, None]), -torch.inf), left)
    return recent | best_text | best_rest

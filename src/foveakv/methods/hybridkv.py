"""HybridKV: static heads keep a pruned cache, dynamic heads fetch chunks back at every step (arXiv 2604.05887)."""

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
from foveakv.methods.snapkv import window_tokens
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
    # What the paper states for its models; the power of two is the nearest, and digests come on top of the budget.
    "paper": {
        "theta": 0.9,
        "rho": 0.75,
        "chunk_size": 8,
        "rounding": "nearest",
        "count_digests": False,
        "window_share": 1.0,
    },
    # For small models and prompts of some hundred tokens (docs/evidence.md): nearly all heads lie above 0.9, questions
    # are shorter than 32 tokens, pictures are few tokens wide, and digests of float32 eat a small budget.
    "small": {"theta_quantile": 0.7, "window": 8, "chunk_size": 4, "digest_dtype": "int8"},
}


@dataclass
class HybridKVState(State):
    """rows: text rows [B, n] and which count. k: of every sequence. Per layer during the prefill: S [B, H], the classes
    [B, H], and scores [B, H, C] of static heads. After it: the maps, and int64 [B] slots of the budget without digests
    (total) and before rounding and trimming (nominal).
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
    """Classify the heads, give each its budget, then prune the static ones and retrieve for the dynamic ones.

    1. Head score, Eq. 2 and 3: S[l, h] = mean over the prompt's text rows of the sum of the k highest attention
       probabilities. Static iff S >= theta, per sequence, layer and KV head.
    2. Budgets, Eq. 4 and 5: `foveakv.core.allocation.allocate_heads`.
    3. Static heads, App. A: text first, then the last `window` tokens, then the visual tokens that the window attends
       to most; once, after the prompt.
    4. Dynamic heads, App. A: their KV moves to a store in chunks of 8 tokens, and every step attends to the chunks
       whose mean key scores highest, until the budget is full.

    Not stated in the paper; we take k = ceil(0.05 C) (its pilot study's), the mean of S over the query group, only
    text rows behind the first visual token and at most 64 of them, alpha = 0.1, window = 32, budgets rounded down to a
    power of two, digests of rotated keys, for a chunk the maximum over the query group (and over the new tokens, if
    there are several) of the softmax over chunks, and decoded tokens on top of the budget. A dynamic head whose budget
    holds no chunk beside the incomplete last one keeps its newest tokens and retrieves nothing.

    Args:
        budget: slots of the prompt that stay on the device, all heads together: 0.1, "10%", 1024 (tokens per head),
            "1GB".
        count_digests: True takes the digests (1/16 of the dynamic heads' KV at chunks of 8) out of the budget, so that
            the device holds no more than it says; at 10% with all heads dynamic that is more than half of it. False
            puts them on top, as the paper's figures do.
        theta: S from which a head is static.
        theta_quantile: static are the heads from this quantile of the sequence's S upwards, in place of `theta`. All
            layers must be known before the first one can shrink, so the peak is that of a full cache.
        rho: mean budget of dynamic heads as a share of the mean budget, Eq. 4.
        alpha: share of the static budget that is dealt out evenly, Eq. 5's a.
        window: tokens at the end of the prompt that static heads keep, and whose attention scores the others.
        window_share: the largest part of a static head's budget that the window may take (not in the paper, which keeps
            the window whole: 1).
        chunk_size: tokens per chunk.
        k_ratio: k of the head score as a share of the prompt.
        text_rows: "after_visual" (text behind the first visual token) or "all".
        max_text_rows: rows that the head score uses at most: the last ones, and evenly spaced ones before.
        rounding: of dynamic budgets to a power of two, "down" or "nearest" (the paper's). The sum of all budgets holds
            either way: what "nearest" rounds up, static heads pay.
        spend_rest: give what rounding down frees to the static heads; False leaves it unspent.
        min_budget: slots that every head is assured of where the total allows it; None = `window`.
        store: where dynamic heads' chunks lie: "host", "device" (saves no memory) or "disk" (a file).
        store_dir: directory of that file; None = the system's temporary directory, which may itself lie in memory.
        digest_dtype: how digests are stored: "model" (the model's dtype), "bf16", or "int8" with one scale per head and
            channel. Fewer bits leave more of the budget for chunks.
        classify: "auto", or "all_static" / "all_dynamic" whatever the scores are.
        head_level: False gives every static head the same budget.
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
        """Settings that go together, changed by `options`: see `PRESETS`."""
        if name not in PRESETS:
            raise MethodError(f"HybridKV has no preset {name!r}; choose one of {', '.join(PRESETS)}")
        return cls(**{**PRESETS[name], **options})

    def __post_init__(self) -> None:
        parse_budget(self.budget)
        share(self.name, "theta", self.theta, meaning="a head score from which a head is static")
        if self.theta_quantile is not None:
            share(self.name, "theta_quantile", self.theta_quantile, meaning="the share of heads that become dynamic")
        share(self.name, "window_share", self.window_share, above_zero=True, meaning="of a budget, for the window")
        share(self.name, "alpha", self.alpha, meaning="the part of the static budget that is dealt out evenly")
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
            raise MethodError(f'hybridkv: store_dir is used by store="disk" only; this one has store={self.store!r}')

    @property
    def observes(self) -> Observes:
        return Observes(queries="all")

    @property
    def decides(self) -> tuple[When, ...]:
        if self.classify == "all_static":
            return "prefill", "after_prefill"
        return "prefill", "after_prefill", "read"

    @property
    def _late(self) -> bool:
        """Whether heads can be classified only when all layers are known."""
        return self.theta_quantile is not None and self.classify == "auto"

    # ---- prefill

    def begin(self, request: PromptView) -> HybridKVState:
        prompt = request.prompt
        share = Fraction(repr(float(self.k_ratio)))  # exact: 0.05 * 140 is 7 and not a little more
        k = [max(1, math.ceil(share * length)) for length in prompt.lengths.tolist()]
        return HybridKVState(text_rows(prompt, self.text_rows == "after_visual", self.max_text_rows), k)

    def prefill(self, view: PrefillView) -> Decision:
        prompt = view.prompt
        state: HybridKVState = view.state
        rows, valid = state.rows
        scores = topk_attention(view.query, view.keys, rows, valid, view.scaling, view.visible, state.k)  # [B, H]
        static = torch.ones_like(scores, dtype=torch.bool) if self._late else self._static(scores)
        state.scores.append(scores)
        state.static.append(static)
        window = None
        if bool(static.any()):
            window = window_scores(view.query, view.keys, self.window, view.scaling, view.visible, prompt.real)
        state.window_scores.append(window)
        # Dynamic heads keep one complete chunk as well, in case their budget turns out too small to retrieve.
        incomplete = prompt.lengths % self.chunk_size
        keep = static[..., None] | (from_end(prompt.real) <= (incomplete + self.chunk_size)[:, None])[:, None]
        return Decision(keep=keep, offload=self._offload(~static))

    def after_prefill(self, view: PromptEndView) -> list[Decision]:
        request, state = view.request, view.state
        geometry, prompt = request.geometry, request.prompt
        scores = torch.stack(state.scores, 1).cpu()  # [B, L, H]
        static = self._static(scores) if self._late else torch.stack(state.static, 1).cpu()
        totals = request.budget_slots(self.budget).tolist()
        if self.count_digests:
            totals = self._less_digests(totals, static, geometry)
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
        """Shares and totals over the sequences, and the maps that they come from."""
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
        return Results(figures, heads=heads)

    def _less_digests(self, totals: list[int], static: Tensor, geometry: Geometry) -> list[int]:
        """What a budget leaves for slots once every dynamic head's digests are paid for, at least one slot per head.

        A budget of the whole prompt pays nothing: all chunks are resident and no digest is needed.
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
        """Which heads are static, from S [B, H] of one layer or [B, L, H] of all."""
        if self.classify != "auto":
            return torch.full_like(scores, self.classify == "all_static", dtype=torch.bool)
        if self.theta_quantile is None:
            return scores >= self.theta
        threshold = scores.flatten(1).double().quantile(self.theta_quantile, dim=1)
        return scores.double() >= threshold.view(-1, *[1] * (scores.dim() - 1))

    def _offload(self, dynamic: Tensor) -> Offload | None:
        """The complete chunks of the dynamic heads [B, H] move to a store."""
        if not bool(dynamic.any()):
            return None
        return Offload(dynamic, self.chunk_size, self.store, self.store_dir, "mean", self.digest_dtype)

    def _settle(
        self, real: Tensor, text: Tensor, static: Tensor, budgets: Tensor, window: Tensor | None
    ) -> tuple[Decision, Tensor]:
        """Brings one layer to its budgets: prunes static heads, says how many chunks dynamic heads choose.

        real, text: bool [B, C]. static bool, budgets int64 [B, H] on the CPU. window: scores [B, H, C] of static heads.
        Returns the decision, and the slots on the device, chosen chunks included: int64 [B, H] on the CPU.
        """
        device = real.device
        static, budgets, lengths = static.to(device), budgets.to(device), real.sum(-1)
        # Dynamic heads keep the incomplete chunk; where no chunk fits beside it, as many of the newest tokens as do.
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
    """What static heads keep (arXiv 2604.05887, App. A): bool [B, H, C] with min(budget, real columns) marks per head.

    scores [B, H, C]; text, real bool [B, C]; budgets int64 [B, H]. Text comes first, then the last `window` columns,
    then the best-scored rest. Where text alone exceeds budget - window, the window stays and the best-scored text: in
    either case the window, then text, then the rest. Not stated in the paper; we keep the newest columns where the
    budget is below the window, give the window at most `window_share` of the budget, and count audio with the rest.
    """
    recent = from_end(real)[:, None] <= window_tokens(budgets, window, window_share)[..., None]
    earlier = real[:, None] & ~recent
    left = budgets - recent.sum(-1)
    best_text = keep_top(scores.masked_fill(~(earlier & text[:, None]), -torch.inf), left)
    left = left - best_text.sum(-1)
    best_rest = keep_top(scores.masked_fill(~(earlier & ~text[:, None]), -torch.inf), left)
    return recent | best_text | best_rest

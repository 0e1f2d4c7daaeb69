"""HybridKV: prune the cache of static heads, retrieve chunks for dynamic heads (arXiv 2604.05887)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from foveakv.core.allocation import allocate_heads
from foveakv.core.attention_stats import text_rows, topk_attention
from foveakv.core.columns import from_end
from foveakv.methods import hybridkv_budgets as rules
from foveakv.methods.base import Method
from foveakv.methods.hybridkv_presets import PRESETS, check_options
from foveakv.methods.hybridkv_state import HybridKVState
from foveakv.methods.presets import Presets
from foveakv.methods.results import HeadMaps, Results
from foveakv.methods.text_first import text_first, text_note
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
from foveakv.methods.windows import Auto, kept_window, scores_of_window, window_note, window_rows


@dataclass
class HybridKV(Presets, Method):
    """Classify heads as static or dynamic, then prune the cache of static heads and retrieve chunks for dynamic heads.

    1. Head score, Eq. 2 and 3: S[l, h] = mean over the prompt's text rows of the sum of the k highest attention
       probabilities. A head is static iff S >= theta, per sequence, layer and KV head.
    2. Budgets, Eq. 4 and 5: `foveakv.core.allocation.allocate_heads`.
    3. Static heads, App. A: keep text first, then the last `window` tokens, then the visual tokens that the window
       attends to most. This happens once, after the prompt.
    4. Dynamic heads, App. A: their keys and values are offloaded in chunks of 8 tokens. Every step attends to the
       chunks whose mean key scores highest, until the budget is full.

    Not stated in the paper; we use
    - k = ceil(0.05 C), as in its pilot study, and alpha = 0.1;
    - the mean of S over the query group, and text rows after the first visual token only, at most 64 of them;
    - digests of rotated keys, and as the score of a chunk the maximum over the query group (and over the new tokens, if
      there are several) of the softmax over chunks;
    - decoded tokens in addition to the budget.
    A dynamic head whose budget holds no chunk besides the incomplete last one keeps its newest tokens and retrieves
    nothing.

    Not in the paper: "auto" adapts its constants to the prompt, the model and the budget
    (`foveakv.methods.hybridkv_budgets`, `windows`), digests take at most a quarter of the budget (heads that would
    exceed it are static), and text can leave `visual_share` to visual tokens. `preset("paper")` has the paper's rules.

    Args:
        budget: slots of the prompt kept on the device, over all heads: 0.1, "10%", 1024 (tokens per head) or "1GB".
        count_digests: count digests towards the budget, so that the device stores no more than the budget. False stores
            them in addition to the budget, as the paper's figures do.
        theta: score S from which a head is static. "auto": the paper's 0.9 if it makes 20% to 80% of the heads dynamic,
            otherwise the lowest-scored heads are dynamic, by what text needs of the budget.
        theta_quantile: replaces `theta` by this quantile of the sequence's scores. With it, and with theta="auto", no
            layer can be pruned before all layers have been read, so the peak memory is that of a full cache.
        rho: mean budget of dynamic heads as a share of the mean budget, Eq. 4. "auto": the paper's 0.75 while static
            heads then hold the text, otherwise more, up to 1.5.
        alpha: share of the static budget that is split evenly, a in Eq. 5.
        window: tokens at the end of the prompt that static heads keep and whose attention scores the other tokens.
            "auto": half of the tokens after the last visual one, 4 to 32.
        window_share: the largest share of a static head's budget for the window (the paper keeps it whole: 1).
        visual_share: the share of a static head's slots besides the window that text leaves to visual tokens.
        chunk_size: tokens per chunk. "auto": 4, or 8 where the mean budget holds 32 of these, or more where digests
            would exceed a quarter of the budget.
        k_ratio: k of the head score as a share of the prompt.
        text_rows: "after_visual" (text after the first visual token) or "all".
        max_text_rows: the most rows for the head score: the last ones, and evenly spaced earlier ones; None = all.
        rounding: how dynamic budgets are rounded: down to whole "chunks", or to a power of two, "down" or "nearest"
            (the paper's). The total holds in any case: slots added by "nearest" are taken from static heads.
        spend_rest: give slots that rounding frees to static heads, or without any to dynamic ones; False leaves them
            unused.
        min_budget: slots that every head gets at least, if the total allows it; None = the window, at most half of the
            mean budget.
        store: where the chunks of dynamic heads are stored: "host", "device" (saves no memory) or "disk" (a file).
        store_dir: directory of that file; None = the system's temporary directory, which may be in memory.
        digest_dtype: how digests are stored: "int8" or "int4" with one scale per head and channel, "bf16", or "model"
            (the model's dtype). "auto": int8, or int4 where int8 would exceed a quarter of the budget.
        classify: "auto", or "all_static" / "all_dynamic" regardless of the scores and of the size of digests.
        head_level: False gives all static heads the same budget.
        type_level: False gives static and dynamic heads the same mean budget.

    `results` has scores, classes and budgets per head.
    """

    budget: float | int | str = 0.1
    theta: float | Auto = "auto"
    theta_quantile: float | None = None
    rho: float | Auto = "auto"
    alpha: float = 0.1
    window: int | Auto = "auto"
    window_share: float = 0.5
    visual_share: float = 0.0
    chunk_size: int | Auto = "auto"
    k_ratio: float = 0.05
    text_rows: Literal["after_visual", "all"] = "after_visual"
    max_text_rows: int | None = 64
    rounding: Literal["chunks", "down", "nearest"] = "chunks"
    spend_rest: bool = True
    min_budget: int | None = None
    store: Literal["host", "device", "disk"] = "host"
    store_dir: str | None = None
    digest_dtype: Literal["auto", "model", "bf16", "int8", "int4"] = "auto"
    classify: Literal["auto", "all_static", "all_dynamic"] = "auto"
    head_level: bool = True
    type_level: bool = True
    count_digests: bool = True

    name: ClassVar[str] = "hybridkv"
    presets: ClassVar[dict[str, dict[str, Any]]] = PRESETS

    def __post_init__(self) -> None:
        check_options(self)

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
        return self.classify == "auto" and (self.theta == "auto" or self.theta_quantile is not None)

    # ---- prefill

    def begin(self, request: PromptView) -> HybridKVState:
        """Select the text rows, compute k of every sequence, and choose the window and the size of chunks."""
        prompt, geometry = request.prompt, request.geometry
        ratio = Fraction(repr(float(self.k_ratio)))  # no rounding error: 0.05 * 140 is 7
        k = [max(1, math.ceil(ratio * length)) for length in prompt.lengths.tolist()]
        totals = request.budget_slots(self.budget)
        share = self._most_dynamic_share if self.count_digests else 0.0
        digest, chunk = rules.auto_digests(geometry, self.digest_dtype, self.chunk_size, totals.tolist(), share)
        most = [geometry.heads] * geometry.batch
        if self.count_digests and self.classify == "auto":
            most = rules.most_dynamic(geometry, digest, chunk, totals.tolist())
        window = window_rows(prompt, self.window, request.block_start)
        text = (prompt.text | (from_end(prompt.real) <= window[:, None])).sum(-1)
        text = (text - request.protected).clamp_min(0)
        text = text * prompt.visual.any(-1)  # text that leaves no slots to images matters only where there are images
        return HybridKVState(
            text_rows(prompt, self.text_rows == "after_visual", self.max_text_rows), k, window=window, text=text,
            digest=digest, chunk=chunk, totals=totals, most=torch.tensor(most),
            refused=torch.zeros(geometry.batch, dtype=torch.int64),
        )  # fmt: skip

    def continue_context(self, request: PromptView, state: State | None) -> HybridKVState:
        """Deal the budget of the context so far to the heads; classes, scores and chunks are those of the first block.

        A dynamic head that read no chunk is static from now on, since its slots and its chunks have tokens in common.
        """
        made = self.begin(request)
        if isinstance(state, HybridKVState) and state.heads is not None and state.starved is not None:
            made.digest, made.chunk, made.refused, made.heads = state.digest, state.chunk, state.refused, state.heads
            made.known, made.offloaded = state.heads.static | state.starved, state.offloaded
        return made

    @property
    def _most_dynamic_share(self) -> float:
        """The largest share of heads that is expected to be dynamic, for the size of chunks."""
        if self.classify != "auto" or (self.theta != "auto" and self.theta_quantile is None):
            return 1.0
        return rules.MOST_DYNAMIC if self.theta_quantile is None else float(self.theta_quantile)

    def prefill(self, view: PrefillView) -> Decision:
        """Score the heads of one layer and classify them, and offload the chunks of its dynamic heads."""
        state: HybridKVState = view.state
        if state.known is not None:
            static = state.known[:, view.compressed_idx].to(view.keys.device)
        else:
            rows, valid = state.rows
            given = view.query, view.keys, rows, valid, view.scaling, view.visible
            scores = topk_attention(*given, state.k, fused=view.fused)  # [B, H]
            static = torch.ones_like(scores, dtype=torch.bool) if self._late else self._by_theta(state, view, scores)
            state.scores.append(scores)
            state.static.append(static)
        state.window_scores.append(scores_of_window(view, state.window) if bool(static.any()) else None)
        candidates = view.candidates
        state.columns.append((candidates, view.prompt.text))
        # Dynamic heads also keep one complete chunk, in case their budget is too small to retrieve.
        newest = candidates.sum(-1) % state.chunk + state.chunk
        keep = static[..., None] | (from_end(candidates) <= newest[..., None])
        return Decision(keep=keep & candidates, offload=self._offload(state, ~static))

    def after_prefill(self, view: PromptEndView) -> list[Decision]:
        """Allocate a budget to every head and reduce all layers to it."""
        state: HybridKVState = view.state
        geometry = view.request.geometry
        scores, static = self._classes(state)
        totals = state.totals.tolist()
        if self.count_digests:
            dynamic = (~static).flatten(1).sum(-1).tolist()
            totals = rules.minus_digests(geometry, state.digest, state.chunk, totals, dynamic)
        rho = [self._rho(static[b], text, totals[b]) for b, text in enumerate(state.text.tolist())]
        parts = [
            allocate_heads(
                scores[b], static[b], context, totals[b], rho[b], self.alpha,
                min_budget=self._minimum(window, totals[b] // geometry.heads),
                chunk=incomplete + state.chunk, step=state.chunk, rounding=self.rounding,
                head_level=self.head_level, type_level=self.type_level, spend_rest=self.spend_rest,
            )
            for b, (context, window, incomplete) in enumerate(
                zip(map(int, geometry.contexts), state.window.tolist(), self._incomplete(state), strict=True)
            )
        ]  # fmt: skip
        budgets = torch.stack([part.budgets for part in parts])  # [B, L, H]
        before = torch.zeros_like(budgets) if state.offloaded is None else state.offloaded
        settled = [
            self._settle(state, layer, static[:, layer], budgets[:, layer], before[:, layer])
            for layer in range(geometry.layers)
        ]
        state.total, state.rho = torch.tensor(totals), torch.tensor(rho, dtype=torch.float64)
        state.nominal = torch.tensor([part.nominal for part in parts])
        decisions, *per_head = zip(*settled, strict=True)
        slots, state.offloaded, state.starved = (torch.stack(each, 1) for each in per_head)
        state.heads = HeadMaps(scores, static, budgets, slots)
        state.scores, state.static, state.window_scores, state.columns = [], [], [], []
        return list(decisions)

    def _classes(self, state: HybridKVState) -> tuple[Tensor, Tensor]:
        """Return S and which heads are static, [B, L, H] on the CPU, after the last layer of a prompt or block."""
        if state.known is not None and state.heads is not None:
            return state.heads.scores, state.known
        scores = torch.stack(state.scores, 1).cpu()
        return scores, self._by_distribution(state, scores) if self._late else torch.stack(state.static, 1).cpu()

    def _incomplete(self, state: HybridKVState) -> list[int]:
        """Return the most tokens of an incomplete chunk of each sequence."""
        each = [(candidates.sum(-1) % state.chunk).amax(-1) for candidates, _ in state.columns]
        most: list[int] = torch.stack(each).amax(0).tolist()
        return most

    def results(self, view: ResultView) -> Results:
        """Return shares and totals over the sequences, the maps per head, and notes on what the budget does not hold.

        `theta` in the figures is the lowest score of the sequence's static heads, None without any.
        """
        state: HybridKVState = view.state
        heads = state.heads
        if heads is None or state.total is None or state.nominal is None or state.rho is None:
            return Results()
        pairs = zip(heads.scores, heads.static, strict=True)
        figures = {
            "static_share": float(heads.static.float().mean()),
            "theta": [float(scores[static].min()) if bool(static.any()) else None for scores, static in pairs],
            "rho": state.rho.tolist(),
            "chunk_size": state.chunk,
            "digest_dtype": state.digest,
            "window": state.window.tolist(),
            "budget_slots": int(state.total.sum()),
            "nominal_slots": int(state.nominal.sum()),
            "slots": int(heads.slots.sum()),
            "digest_bytes": view.digest_bytes,
            "refused_heads": state.refused.tolist(),
        }
        return Results(figures, notes=self._notes(view, state, heads), heads=heads)

    def _notes(self, view: ResultView, state: HybridKVState, heads: HeadMaps) -> tuple[str, ...]:
        prompt, geometry = view.request.prompt, view.request.geometry
        budgets = heads.budgets
        text = (prompt.text.sum(-1) - view.request.protected).clamp_min(0)
        lengths, rows, text = (
            counts.cpu()[:, None, None].expand_as(budgets)
            for counts in (prompt.lengths, state.window, text * prompt.visual.any(-1))
        )
        evicts = heads.static & (budgets < lengths)
        kept = kept_window(budgets, rows, self.window_share)
        notes = window_note(self.window, rows, kept, evicts, budgets)
        tight = state.rho is not None and self.rho == "auto" and bool((state.rho > rules.PAPER_RHO).any())
        if tight and state.rho is not None:
            notes += (
                f"static heads do not hold the text of the prompt ({int(text.max())} tokens): dynamic heads get "
                f"{float(state.rho.max()):.2f} of the mean budget (rho=auto) instead of {rules.PAPER_RHO}",
            )
        else:
            notes += text_note(text[evicts], budgets[evicts], self.visual_share, "the budgets of static heads")
        if self.chunk_size == "auto" and state.chunk > rules.PAPER_CHUNK:
            notes += (
                f"chunk_size=auto: chunks of {state.chunk} tokens, since digests of smaller ones exceed the budget",
            )
        if int(state.refused.sum()) * 10 > heads.static.numel():
            notes += (
                f"{int(state.refused.sum())} heads are static that would be dynamic: digests take at most a quarter of "
                "the budget",
            )
        slots = view.digest_bytes / geometry.slot_bytes
        if self.count_digests and slots > float(rules.DIGEST_SHARE) * float(state.totals.sum()):
            notes += (f"digests take {slots / float(state.totals.sum()):.0%} of the budget; use larger chunks",)
        starved = ~heads.static & (budgets < lengths) & (budgets < lengths % state.chunk + state.chunk)
        if bool(starved.any()):
            notes += (
                f"{int(starved.sum())} dynamic heads keep their newest tokens only: the budget holds no chunk of "
                f"{state.chunk} tokens; raise it, or use smaller chunks",
            )
        return notes

    def _rho(self, static: Tensor, text: int, total: int) -> float:
        if self.rho != "auto":
            return float(self.rho)
        return rules.auto_rho(static, text, total) if self.type_level else rules.PAPER_RHO

    def _minimum(self, window: int, mean: int) -> int:
        return max(1, min(window, mean // 2)) if self.min_budget is None else self.min_budget

    def _by_theta(self, state: HybridKVState, view: PrefillView, scores: Tensor) -> Tensor:
        """Return which heads of one layer are static, bool [B, H], from S [B, H].

        The layers up to this one share the dynamic heads that the digests allow in proportion.
        """
        if self.classify != "auto":
            return torch.full_like(scores, self.classify == "all_static", dtype=torch.bool)
        wanted = scores >= float(self.theta)
        used = torch.stack(state.static).logical_not().sum((0, 2)).tolist() if state.static else [0] * len(wanted)
        layers, done = view.request.geometry.layers, view.compressed_idx + 1
        room = [most * done // layers - before for most, before in zip(state.most.tolist(), used, strict=True)]
        return self._within(state, scores, wanted, room)

    def _by_distribution(self, state: HybridKVState, scores: Tensor) -> Tensor:
        """Return which heads are static, bool [B, L, H], from S [B, L, H] of all layers."""
        if self.theta_quantile is not None:
            threshold = scores.flatten(1).double().quantile(self.theta_quantile, dim=1)
            static = scores.double() >= threshold[:, None, None]
        else:
            every = zip(scores, state.text.tolist(), state.totals.tolist(), strict=True)
            static = torch.stack([rules.auto_static(row, text, total) for row, text, total in every])
        return self._within(state, scores, static, state.most.tolist())

    def _within(self, state: HybridKVState, scores: Tensor, static: Tensor, most: list[int]) -> Tensor:
        """Make heads static where more than `most` of a sequence's heads are dynamic."""
        allowed = rules.fewer_dynamic(scores, static, most)
        state.refused = state.refused + (allowed & ~static).flatten(1).sum(-1).cpu()
        return allowed

    def _offload(self, state: HybridKVState, dynamic: Tensor) -> Offload | None:
        """Return the offload of the dynamic heads' complete chunks; dynamic: bool [B, H]."""
        if not bool(dynamic.any()):
            return None
        return Offload(dynamic, state.chunk, self.store, self.store_dir, "mean", state.digest)

    def _settle(
        self, state: HybridKVState, layer: int, static: Tensor, budgets: Tensor, before: Tensor
    ) -> tuple[Decision, Tensor, Tensor, Tensor]:
        """Reduce one layer to its budgets: prune static heads, and set the number of chunks that dynamic heads read.

        Args:
            state: of the request.
            layer: index of the layer.
            static, budgets, before: bool, int64 and int64 [B, H], on the CPU. before: chunks in the heads' stores.

        Returns:
            The decision, and [B, H] on the CPU: the slots on the device, chosen chunks included, int64, the chunks in
            the stores, int64, and the dynamic heads that read none of theirs, bool.
        """
        (candidates, text), chunk, window = state.columns[layer], state.chunk, state.window_scores[layer]
        static, budgets, before = (each.to(candidates.device) for each in (static, budgets, before))
        lengths = candidates.sum(-1)  # [B, 1 or H]
        # Dynamic heads keep the incomplete chunk; if no other chunk fits the budget, they keep their newest tokens.
        complete, incomplete = (before + lengths // chunk).masked_fill(static, 0), lengths % chunk
        chunks = ((budgets - incomplete).clamp_min(0) // chunk).masked_fill(static, 0)  # [B, H]
        keep = from_end(candidates) <= torch.where(chunks > 0, incomplete, budgets)[..., None]
        if window is not None:
            recent = kept_window(budgets, state.window[:, None], self.window_share)
            kept = text_first(window, text, candidates, budgets, recent, self.visual_share)
            keep = torch.where(static[..., None], kept, keep)
        slots = (keep & candidates).sum(-1) + torch.minimum(chunks, complete) * chunk
        offload = self._offload(state, ~static) if self._late and state.known is None else None
        offloaded = complete.masked_fill(chunks >= complete, 0)  # a head that holds all its chunks has no store
        decision = Decision(keep=keep & candidates, offload=offload, chunks=chunks)
        return decision, slots.cpu(), offloaded.cpu(), ((chunks == 0) & (complete > 0)).cpu()

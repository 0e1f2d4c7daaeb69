"""MustDrop: drop visual tokens in several layers of the prompt, but never the key ones (Liu et al., arXiv 2411.10803).

Of its three stages, the vision stage is out of a cache's reach. What is here is the prefill stage (dual-attention
filtering) and the decode stage (output-aware cache policy).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Integral, Real
from typing import ClassVar

import torch
from torch import Tensor

from foveakv.core.attention_stats import attention_rows, head_mean_stats, text_rows
from foveakv.core.prompt import VIDEO, PromptMap
from foveakv.core.selection import keep_top
from foveakv.errors import MethodError
from foveakv.methods.base import Method
from foveakv.methods.checks import flag, number, share
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

_IMAGES = 8  # images whose rows are formed at once


@dataclass
class MustDropState(State):
    """stages: filtering layers that the model has. keep: bool [B, C], what the layers up to here leave.

    protected: bool [B, C], key tokens, during the prefill. kept_visual: int64 [B], once it is over.
    """

    stages: list[int]
    keep: Tensor
    protected: Tensor | None = None
    kept_visual: Tensor | None = None


@dataclass
class MustDrop(Method):
    """In each of `layers`, drop the visual tokens that the text neither looks at in sum nor anywhere strongly.

    Dual-attention filtering: with A[i, j] the head-mean attention of text token i to visual token j in that layer, j
    goes when sum_i A[i, j] < r * sum_ij A[i, j] and max_i A[i, j] < alpha. It is DAP's test in HAE, in several layers,
    each over the tokens that are left. Key tokens never go. With `decode_stage`, every layer from the first filtering
    one on ends with what the last one left (the output-aware cache policy); without, a layer stores what it would have
    read, so that a filtering layer still has what it drops for later ones. Earlier layers keep all.

    Not stated in the paper, or out of reach of a cache; we
    - count layers from 0 among those with a compressed cache, and pass over numbers that the model does not have;
    - take as key tokens, in place of those that the vision tower's [CLS] token attends to, the share `protect` of every
      picture that its own last token attends to most in the first filtering layer (0.08 is the authors' code);
    - leave tokens in the residual stream, so that later layers' scores still pay attention to dropped ones;
    - do not merge neighbouring tokens, which the paper does in the vision tower.

    Args:
        layers: filtering layers, as "2,6,10,14" or (2, 6, 10, 14).
        r, alpha: limits of the two tests. The paper's values for LLaVA-1.5: 0.001 and 0.001 for 192 tokens on average,
            0.0012 and 0.001 for 128.
        protect: share of every picture's tokens that never go, rounded up.
        decode_stage: the output-aware cache policy.
        target_visual_tokens: keep exactly so many visual tokens per sequence, or this share of them, behind the last
            filtering layer, in equal steps, key tokens first and then the largest sums, in place of the tests (ours).
    """

    layers: tuple[int, ...] | str = "2,6,10,14"
    r: float = 0.001
    alpha: float = 0.001
    protect: float = 0.08
    decode_stage: bool = True
    target_visual_tokens: int | float | None = None

    name: ClassVar[str] = "mustdrop"
    visual_only: ClassVar[bool] = True

    def __post_init__(self) -> None:
        numbers(self.layers)
        number(self.name, "r", self.r, 0, meaning="a share of attention")
        number(self.name, "alpha", self.alpha, 0, meaning="a probability")
        share(self.name, "protect", self.protect, meaning="of every picture's tokens")
        flag(self.name, "decode_stage", self.decode_stage)
        target = self.target_visual_tokens
        if target is not None:
            real = isinstance(target, Real) and not isinstance(target, bool)
            if not real or not target >= 0 or (not isinstance(target, Integral) and target > 1):
                raise MethodError(
                    "mustdrop: target_visual_tokens must be a number of tokens (192) or a share of them (0.33); "
                    f"got {target!r}"
                )

    @property
    def granularity(self) -> Granularity:
        return "layer"

    @property
    def observes(self) -> Observes:
        return Observes(queries="text")

    @property
    def decides(self) -> tuple[When, ...]:
        return "prefill", "after_prefill"

    def needs_queries(self, compressed_idx: int) -> bool:
        return compressed_idx in numbers(self.layers)

    def begin(self, request: PromptView) -> MustDropState:
        count = len(request.layers)
        stages = [layer for layer in numbers(self.layers) if layer < count]
        if not stages:
            raise MethodError(
                f"mustdrop: layers={self.layers!r} are counted from 0, and this model compresses {count}; name one of "
                f"0 to {count - 1}"
            )
        return MustDropState(stages, request.prompt.real)

    def prefill(self, view: PrefillView) -> Decision:
        state: MustDropState = view.state
        keep = state.keep
        if view.compressed_idx in state.stages:
            if state.protected is None:
                state.protected = self._key_tokens(view)
            state.keep = keep & ~self._dropped(view, keep, state)
        return Decision(keep=keep[:, None])

    def after_prefill(self, view: PromptEndView) -> list[Decision] | None:
        state: MustDropState = view.state
        state.kept_visual = (state.keep & view.request.prompt.visual).sum(-1)
        keep, state.protected = state.keep[:, None], None
        if not self.decode_stage:
            return None
        first = state.stages[0]
        return [Decision(keep=keep if idx >= first else None) for idx in range(len(view.request.layers))]

    def results(self, view: ResultView) -> Results:
        """`kept_visual`: visual tokens of each sequence after the last filtering layer."""
        kept = view.state.kept_visual
        return Results({} if kept is None else {"kept_visual": kept.tolist()})

    def _dropped(self, view: PrefillView, keep: Tensor, state: MustDropState) -> Tensor:
        """The visual tokens that this layer drops: bool [B, C]."""
        visual = view.prompt.visual & keep
        protected = torch.zeros_like(keep) if state.protected is None else state.protected
        rows, valid = text_rows(view.prompt, max_rows=None)
        stats = head_mean_stats(view.query, view.keys, rows, valid, view.scaling, view.visible)
        if self.target_visual_tokens is None:
            return filtered(stats.sums, stats.maxima, visual, self.r, self.alpha) & ~protected
        stages = state.stages
        wanted = stage_counts(
            view.prompt.visual.sum(-1), self.target_visual_tokens, stages.index(view.compressed_idx) + 1, len(stages)
        )
        score = torch.where(protected, stats.sums + stats.sums.amax(-1, keepdim=True) + 1, stats.sums)
        return visual & ~keep_top(score.masked_fill(~visual, -torch.inf), wanted)

    def _key_tokens(self, view: PrefillView) -> Tensor:
        """For every picture, the columns that its own last token attends to most: bool [B, C]."""
        prompt = view.prompt
        if self.protect == 0:
            return torch.zeros_like(prompt.real)
        return key_tokens(view, picture_numbers(prompt), self.protect)


def numbers(layers: tuple[int, ...] | str) -> list[int]:
    """The filtering layers, ascending; `MethodError` where they cannot be read."""
    try:
        parts = layers.split(",") if isinstance(layers, str) else list(layers)
        whole = [int(part) for part in parts if isinstance(part, str) or type(part) is int]
        if whole and len(whole) == len(parts) and min(whole) >= 0 and len(set(whole)) == len(whole):
            return sorted(whole)
    except (TypeError, ValueError):
        pass
    raise MethodError(
        f'mustdrop: layers must be different whole numbers from 0, as "2,6,10,14" or (2, 6, 10, 14); got {layers!r}'
    )


def filtered(sums: Tensor, maxima: Tensor, visual: Tensor, r: float, alpha: float) -> Tensor:
    """Dual-attention filtering: the tokens of visual, bool [B, C], that fail both tests; sums, maxima [B, C]."""
    total = sums.masked_fill(~visual, 0).sum(-1, keepdim=True)
    return visual & (sums < r * total) & (maxima < alpha)


def stage_counts(visual: Tensor, target: float, stage: int, stages: int) -> Tensor:
    """Visual tokens that stay after `stage` of `stages`, counted from 1: int64 [B]; visual int64 [B] is how many are.

    Equal steps from all of them to `target`, a number or a share.
    """
    counts = []
    for count in visual.tolist():
        least = min(int(target) if isinstance(target, Integral) else round(target * count), count)
        counts.append(count - (count - least) * stage // stages)
    return torch.tensor(counts, device=visual.device)


def picture_numbers(prompt: PromptMap) -> Tensor:
    """Which picture a column belongs to, counted from 0 in each sequence: int64 [B, C], -1 for none."""
    named = torch.where(prompt.visual, prompt.index.long() * 2 + (prompt.kinds == VIDEO), -1)
    numbered = torch.full_like(named, -1)
    for b, row in enumerate(named):
        found, order = row.unique(return_inverse=True)
        numbered[b] = order - int(bool((found < 0).any()))
    return numbered


def key_tokens(view: PrefillView, pictures: Tensor, portion: float) -> Tensor:
    """The `portion` of every picture that its last token attends to most, head mean: bool [B, C]; pictures [B, C]."""
    columns = torch.arange(pictures.shape[1], device=pictures.device)
    keys = torch.zeros_like(pictures, dtype=torch.bool)
    for start in range(0, int(pictures.max()) + 1, _IMAGES):
        named = torch.arange(start, min(start + _IMAGES, int(pictures.max()) + 1), device=pictures.device)
        members = pictures[:, None] == named[:, None]  # [B, n, C]
        last = torch.where(members, columns, -1).amax(-1)
        rows = attention_rows(view.query, view.keys, last.clamp_min(0), view.scaling, view.visible, last >= 0)
        score = rows.mean((1, 2)).masked_fill(~members, -torch.inf)
        counts = [[math.ceil(portion * n - 1e-9) for n in row] for row in members.sum(-1).tolist()]
        keys |= keep_top(score, torch.tensor(counts, device=score.device)).any(1)
    return keys

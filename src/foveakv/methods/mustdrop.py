"""MustDrop: evict visual tokens in several layers, but never the key tokens (Liu et al., arXiv 2411.10803).

Implements two of its three stages, the prefill stage (dual-attention filtering) and the decode stage (output-aware
cache policy). The vision stage cannot be implemented in a KV cache.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import ClassVar

import torch
from torch import Tensor

from foveakv.core.attention_stats import attention_rows, head_mean_stats, text_rows
from foveakv.core.prompt import VIDEO, PromptMap
from foveakv.core.selection import keep_top
from foveakv.errors import MethodError
from foveakv.methods.base import Method, ModelFacts
from foveakv.methods.checks import flag, number, share
from foveakv.methods.contexts import at_view, before_text, grown, in_context, still_open, stored_prompt
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

_IMAGES = 8  # images whose attention rows are computed at once


@dataclass
class MustDropState(State):
    """State of one request. Masks over the N columns of the context are bool [B, N].

    stages: the filtering layers that the model has. keep: what the layers of this block have kept so far. judge: visual
    columns that are judged now. open: visual columns that wait for text. gone: what the last filtering layer has
    evicted in any block. protected: key tokens. columns: of every layer of a further block, positions int64 [B, C] and
    what heads may keep, bool [B, 1 or H, C]. kept_visual: int64 [B].
    """

    stages: list[int]
    keep: Tensor
    judge: Tensor
    open: Tensor
    gone: Tensor | None = None
    protected: Tensor | None = None
    columns: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    kept_visual: Tensor | None = None


@dataclass
class MustDrop(Method):
    """In each of `layers`, evict the visual tokens with both a low sum and a low maximum of attention from text tokens.

    Dual-attention filtering: let A[i, j] be the head-mean attention of text token i to visual token j in a filtering
    layer. Token j is evicted if sum_i A[i, j] < r * sum_ij A[i, j] and max_i A[i, j] < alpha. This is the test of DAP
    in HAE, applied in several layers, each time to the remaining tokens. Key tokens are never evicted. With
    `decode_stage`, all layers from the first filtering layer on keep only the tokens that the last one keeps (the
    output-aware cache policy). Without it, a layer stores the tokens that remained before it, so a filtering layer
    still stores the tokens that it evicts for later layers. Layers before the first filtering layer keep everything.

    Not stated in the paper, or not possible in a KV cache; we
    - count layers from 0 among the compressed layers, and ignore numbers that the model does not have;
    - use as key tokens, in place of those that the vision tower's [CLS] token attends to, the share `protect` of every
      image that its own last token attends to most in the first filtering layer (0.08 is the authors' code);
    - keep tokens in the residual stream, so that scores of later layers still include attention to evicted ones;
    - do not merge neighbouring tokens, which the paper does in the vision tower.

    Args:
        layers: filtering layers, as "2,6,10,14" or (2, 6, 10, 14); or shares of the depth, "0.1,0.2,0.3,0.5" (not in
            the paper).
        r, alpha: thresholds of the two tests. The paper's values for LLaVA-1.5: 0.001 and 0.001 for 192 tokens on
            average, 0.0012 and 0.001 for 128.
        protect: share of every image's tokens that are never evicted, rounded up.
        decode_stage: use the output-aware cache policy.
        target_visual_tokens: number of visual tokens to keep per sequence after the last filtering layer, or their
            share; reached in equal steps, key tokens first and then the largest sums. Replaces the tests (not in the
            paper).

    Raises:
        MethodError: an option is invalid, or the model has none of `layers`.
    """

    layers: tuple[int | float, ...] | str = "2,6,10,14"
    r: float = 0.001
    alpha: float = 0.001
    protect: float = 0.08
    decode_stage: bool = True
    target_visual_tokens: int | float | None = None
    _numbers: tuple[int, ...] | None = field(default=None, init=False, repr=False, compare=False)

    name: ClassVar[str] = "mustdrop"
    visual_only: ClassVar[bool] = True

    def __post_init__(self) -> None:
        numbers(self.layers)
        number(self.name, "r", self.r, 0, meaning="a share of attention")
        number(self.name, "alpha", self.alpha, 0, meaning="a probability")
        share(self.name, "protect", self.protect, meaning="of every image's tokens")
        flag(self.name, "decode_stage", self.decode_stage)
        target = self.target_visual_tokens
        if target is not None:
            real = isinstance(target, Real) and not isinstance(target, bool)
            if not real or not target >= 0 or (not isinstance(target, Integral) and target > 1):
                raise MethodError(
                    "mustdrop: target_visual_tokens must be a number of tokens (192) or a share of them (0.33); "
                    f"got {target!r}"
                )

    def for_model(self, model: ModelFacts) -> MustDrop:
        """Find the filtering layers in the model where they are shares of its depth."""
        made = copy.copy(self)
        made._numbers = tuple(numbers(self.layers, len(model.layers)))
        return made

    @property
    def _filtering(self) -> tuple[int, ...]:
        return tuple(numbers(self.layers)) if self._numbers is None else self._numbers

    @property
    def granularity(self) -> Granularity:
        """All heads of a layer store the same tokens."""
        return "layer"

    @property
    def observes(self) -> Observes:
        """The text queries."""
        return Observes(queries="text")

    @property
    def decides(self) -> tuple[When, ...]:
        """Evicts in every layer's prefill, and again after the last one."""
        return "prefill", "after_prefill"

    def needs_queries(self, compressed_idx: int) -> bool:
        """True for the filtering layers only."""
        return compressed_idx in self._filtering

    def begin(self, request: PromptView) -> MustDropState:
        """Find the filtering layers that the model has."""
        count = len(request.layers)
        stages = [layer for layer in self._filtering if layer < count]
        if not stages:
            raise MethodError(
                f"mustdrop: layers={self.layers!r} are counted from 0, and this model compresses {count}; name one of "
                f"0 to {count - 1}"
            )
        prompt = request.prompt
        judge = before_text(prompt, request.block_start)
        return MustDropState(stages, prompt.real, judge, prompt.visual & ~judge)

    def continue_context(self, request: PromptView, state: State | None) -> MustDropState:
        """Find the visual tokens to judge now: those that a text token of the block comes after."""
        made, prompt = self.begin(request), request.prompt
        if not isinstance(state, MustDropState):
            return made
        waiting = still_open(state.open, prompt)
        made.judge, made.open = waiting & made.judge, waiting & ~made.judge
        made.gone = None if state.gone is None else grown(state.gone, prompt.columns, False)
        made.protected = None if state.protected is None else grown(state.protected, prompt.columns, False)
        return made

    def prefill(self, view: PrefillView) -> Decision:
        """Keep the tokens that remained before this layer; a filtering layer evicts more for the layers after it."""
        state: MustDropState = view.state
        keep = state.keep
        if view.stored is not None:
            state.columns.append((view.positions, view.candidates))
        if view.compressed_idx in state.stages:
            if view.compressed_idx == state.stages[0]:
                state.protected = self._key_tokens(view)
            state.keep = keep & ~self._dropped(view, keep, state)
        return Decision(keep=at_view(keep, view)[:, None] & view.candidates)

    def after_prefill(self, view: PromptEndView) -> list[Decision] | None:
        """Apply the output-aware cache policy, with `decode_stage`."""
        state: MustDropState = view.state
        state.gone = ~state.keep if state.gone is None else state.gone | ~state.keep
        state.kept_visual = (view.request.prompt.visual & ~state.gone).sum(-1)
        keep, columns, state.columns = state.keep, state.columns, []
        if not self.decode_stage:
            return None
        masks = [keep.gather(1, each.clamp_min(0))[:, None] & candidates for each, candidates in columns]
        masks = masks or [keep[:, None]] * len(view.request.layers)
        return [Decision(keep=mask if idx >= state.stages[0] else None) for idx, mask in enumerate(masks)]

    def results(self, view: ResultView) -> Results:
        """Return `kept_visual`, the visual tokens of each sequence after the last filtering layer."""
        kept = view.state.kept_visual
        return Results({} if kept is None else {"kept_visual": kept.tolist()})

    def _dropped(self, view: PrefillView, keep: Tensor, state: MustDropState) -> Tensor:
        """Return the visual tokens that this layer evicts: bool [B, N]."""
        judging = stored_prompt(view).visual & state.judge
        visual = judging & keep
        protected = torch.zeros_like(keep) if state.protected is None else state.protected
        rows, valid = text_rows(view.prompt, max_rows=None, start=view.first_row)
        stats = head_mean_stats(view.query, view.keys, rows, valid, view.scaling, view.visible)
        sums, maxima = in_context(stats.sums, view), in_context(stats.maxima, view)
        if self.target_visual_tokens is None:
            return filtered(sums, maxima, visual, self.r, self.alpha) & ~protected
        stages = state.stages
        wanted = stage_counts(
            judging.sum(-1), self.target_visual_tokens, stages.index(view.compressed_idx) + 1, len(stages)
        )
        score = torch.where(protected, sums + sums.amax(-1, keepdim=True) + 1, sums)
        return visual & ~keep_top(score.masked_fill(~visual, -torch.inf), wanted)

    def _key_tokens(self, view: PrefillView) -> Tensor:
        """Return for every image the columns that its own last token attends to most: bool [B, N].

        In a further block, images that have no token in it keep their key tokens.
        """
        prompt, before = view.prompt, view.state.protected
        if self.protect == 0:
            return torch.zeros_like(view.request.prompt.real)
        images = image_numbers(prompt, view.first_row)
        found = in_context(key_tokens(view, images, self.protect), view)
        return found if before is None else torch.where(in_context(images >= 0, view), found, before)


def numbers(layers: tuple[int | float, ...] | str, depth: int | None = None) -> list[int]:
    """Parse the filtering layers into an ascending list.

    Args:
        layers: indices, or shares of the depth.
        depth: number of compressed layers; None = unknown, shares then stand for layers of a model of 100.

    Raises:
        MethodError: they are neither distinct whole numbers from 0 nor distinct shares below 1.
    """
    try:
        parts = layers.strip("()[] ").split(",") if isinstance(layers, str) else list(layers)
        read = [(float(part) if "." in part else int(part)) if isinstance(part, str) else part for part in parts]
        if read and len(set(read)) == len(read) and min(read) >= 0:
            if all(type(part) is int for part in read):
                return sorted(int(part) for part in read)
            if all(type(part) is float and part < 1 for part in read):
                return sorted({int(part * (depth or 100) + 1e-9) for part in read})
    except (TypeError, ValueError):
        pass
    raise MethodError(
        'mustdrop: layers must be different whole numbers from 0, as "2,6,10,14" or (2, 6, 10, 14), or shares of the '
        f'depth, as "0.1,0.3"; got {layers!r}'
    )


def filtered(sums: Tensor, maxima: Tensor, visual: Tensor, r: float, alpha: float) -> Tensor:
    """Return the tokens of `visual` that fail both tests of dual-attention filtering: bool [B, C].

    sums, maxima: [B, C]. visual: bool [B, C], the remaining visual tokens.
    """
    total = sums.masked_fill(~visual, 0).sum(-1, keepdim=True)
    return visual & (sums < r * total) & (maxima < alpha)


def stage_counts(visual: Tensor, target: float, stage: int, stages: int) -> Tensor:
    """Return the number of visual tokens to keep after a stage: int64 [B], in equal steps down to the target.

    Args:
        visual: int64 [B], visual tokens of each sequence.
        target: number of visual tokens after the last stage, or their share.
        stage: the stage, counted from 1.
        stages: number of stages.
    """
    counts = []
    for count in visual.tolist():
        least = min(int(target) if isinstance(target, Integral) else round(target * count), count)
        counts.append(count - (count - least) * stage // stages)
    return torch.tensor(counts, device=visual.device)


def image_numbers(prompt: PromptMap, start: int = 0) -> Tensor:
    """Return the image that each column belongs to, counted from 0 per sequence: int64 [B, C], -1 for none.

    start: only images with a token from this column on are counted.
    """
    named = torch.where(prompt.visual, prompt.index.long() * 2 + (prompt.kinds == VIDEO), -1)
    numbered = torch.full_like(named, -1)
    for b, row in enumerate(named):
        if start:
            row = torch.where(torch.isin(row, row[start:]), row, -1)
        found, order = row.unique(return_inverse=True)
        numbered[b] = order - int(bool((found < 0).any()))
    return numbered


def key_tokens(view: PrefillView, images: Tensor, portion: float) -> Tensor:
    """Select the `portion` of every image that its last token attends to most, averaged over heads: bool [B, C].

    images: int64 [B, C], see `image_numbers`.
    """
    columns = torch.arange(images.shape[1], device=images.device)
    keys = torch.zeros_like(images, dtype=torch.bool)
    for start in range(0, int(images.max()) + 1, _IMAGES):
        named = torch.arange(start, min(start + _IMAGES, int(images.max()) + 1), device=images.device)
        members = images[:, None] == named[:, None]  # [B, n, C]
        last = torch.where(members, columns, -1).amax(-1)
        rows = attention_rows(view.query, view.keys, last.clamp_min(0), view.scaling, view.visible, last >= 0)
        score = rows.mean((1, 2)).masked_fill(~members, -torch.inf)
        counts = [[math.ceil(portion * n - 1e-9) for n in row] for row in members.sum(-1).tolist()]
        keys |= keep_top(score, torch.tensor(counts, device=score.device)).any(1)
    return keys

"""VL-Cache: layer budgets by the sparsity of post-vision attention (Tu et al., arXiv 2410.23317)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from foveakv.core.allocation import share_out
from foveakv.core.attention_stats import attention_rows
from foveakv.core.budget import parse_budget
from foveakv.core.columns import newest, real_first
from foveakv.core.prompt import PromptMap
from foveakv.core.selection import keep_top
from foveakv.methods.base import Method
from foveakv.methods.checks import share
from foveakv.methods.results import Results
from foveakv.methods.views import Decision, Observes, PrefillView, PromptEndView, PromptView, ResultView, State, When

LEAST = 0.01  # smallest share of the prompt that a layer keeps, if the budget allows it
_TILE = 2**21  # the most probabilities computed at once


@dataclass
class VLCacheState(State):
    """State of one request.

    rows, valid: the post-vision rows, int64 and bool [B, n]. Per layer, during the prefill: scores [B, H, C],
    candidates bool [B, 1 or H, C], density [B]. sparsity: float64 [B, L]. tokens: int64 [B, L], tokens per head.
    """

    rows: Tensor
    valid: Tensor
    scores: list[Tensor] = field(default_factory=list)
    candidates: list[Tensor] = field(default_factory=list)
    density: list[Tensor] = field(default_factory=list)
    sparsity: Tensor | None = None
    tokens: Tensor | None = None


@dataclass
class VLCache(Method):
    """Give larger budgets to layers with denser attention, and keep the tokens that text after the images attends to.

    Post-vision attention is the attention of the prompt tokens after the last visual token. A layer's sparsity g is the
    share of its entries, over all heads, that are below `threshold` times the maximum of their row (the paper's
    ThresholdFilter); masked pairs do not count. Layers share the budget in proportion to 1 - g (its sparsity-aware
    cache budget allocation). Each head keeps the tokens with the largest sum of post-vision attention (its
    modality-aware token scoring). No layer can be pruned before all layers have been read, so the peak memory is that
    of a full cache.

    Not stated in the paper, or not clearly; we
    - use the share `recent` of the mean budget for the newest tokens in every layer, within the layer's budget;
    - rank tokens per KV head, by the sum over its query group;
    - give a layer at least 1% of the prompt and one token, and at most the prompt, and redistribute the difference;
    - use the last token's row if no token follows the last image, and all rows of a prompt without images.

    Args:
        budget: slots over all layers and heads: a share of the prompt, tokens per head on average, or bytes.
        threshold: the paper's p.
        recent: share of the mean budget for the newest tokens.
    """

    budget: float | int | str = 0.2
    threshold: float = 0.01
    recent: float = 0.1

    name: ClassVar[str] = "vlcache"

    def __post_init__(self) -> None:
        parse_budget(self.budget)
        share(self.name, "threshold", self.threshold, meaning="of a row's maximum; entries below it are sparse")
        share(self.name, "recent", self.recent, meaning="of the mean budget, for the newest tokens")

    @property
    def observes(self) -> Observes:
        """The text queries."""
        return Observes(queries="text")

    @property
    def decides(self) -> tuple[When, ...]:
        """Evicts after the last layer's prefill."""
        return ("after_prefill",)

    def begin(self, request: PromptView) -> VLCacheState:
        """Select the post-vision rows."""
        return VLCacheState(*post_vision_rows(request.prompt))

    def prefill(self, view: PrefillView) -> None:
        """Measure post-vision attention in one layer: the scores of its tokens and its density."""
        state: VLCacheState = view.state
        rows, valid = state.rows, state.valid
        if view.stored is not None:  # columns of a further block differ from layer to layer
            rows, valid = post_vision_rows(view.prompt, view.first_row)
        scores, density = post_vision(view, rows, valid, self.threshold)
        state.scores.append(scores)
        state.candidates.append(view.candidates)
        state.density.append(density)

    def after_prefill(self, view: PromptEndView) -> list[Decision]:
        """Allocate the budget to layers and select the tokens of every head."""
        state: VLCacheState = view.state
        request, real = view.request, view.request.prompt.real
        geometry, layers = request.geometry, len(request.layers)
        density = torch.stack(state.density, 1).double().cpu()  # [B, L]
        totals = (request.budget_slots(self.budget) // geometry.kv_heads).tolist()  # tokens over all layers
        contexts = [int(context) for context in geometry.contexts]
        sizes = torch.stack([layer_tokens(density[b], totals[b], context) for b, context in enumerate(contexts)])
        mean = torch.tensor([int(total / layers * self.recent + 1e-9) for total in totals]).to(real.device)
        decisions = []
        for layer, (received, candidates) in enumerate(zip(state.scores, state.candidates, strict=True)):
            size = sizes[:, layer].to(real.device)
            window = newest(candidates, torch.minimum(mean, size))  # [B, 1 or H, C]
            score = received.masked_fill(window | ~candidates, -torch.inf)
            decisions.append(Decision(keep=keep_top(score, size[:, None] - window.sum(-1)) | window))
        state.scores, state.candidates, state.density = [], [], []
        state.sparsity, state.tokens = 1 - density, sizes
        return decisions

    def results(self, view: ResultView) -> Results:
        """Return the sparsity and the tokens per head of every layer, for each sequence."""
        sparsity, tokens = view.state.sparsity, view.state.tokens
        if sparsity is None or tokens is None:
            return Results()
        return Results({"sparsity": sparsity.tolist(), "tokens": tokens.tolist()}, layer_tokens=tokens)


def layer_tokens(density: Tensor, total: int, context: int) -> Tensor:
    """Return the tokens per head of every layer: int64 [L], summing to `total` or to the most that the layers can hold.

    density: float64 [L], 1 - g. total: tokens over all layers. context: prompt tokens.
    """
    layers = density.numel()
    total = min(total, layers * context)
    least = max(1, min(int(LEAST * context), total // layers))
    return share_out(density / density.sum(), total, least, context)


def post_vision_rows(prompt: PromptMap, start: int = 0) -> tuple[Tensor, Tensor]:
    """Return the rows after the last visual token: columns int64 [B, n], and bool [B, n], which of them count.

    start: column of the newest block; earlier rows do not count.
    """
    columns = torch.arange(prompt.columns, device=prompt.kinds.device)
    real = prompt.real & (columns >= start)
    last = torch.where(prompt.visual, columns, -1).amax(-1, keepdim=True)
    after = real & (columns > last)
    after |= newest(real, (~after.any(-1)).long())  # at least one row
    counts = after.sum(-1)
    most = int(counts.max())
    return real_first(after)[:, :most], torch.arange(most, device=real.device) < counts[:, None]


def post_vision(view: PrefillView, rows: Tensor, valid: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    """Measure the attention of some rows in one layer.

    Args:
        view: the layer.
        rows, valid: int64 and bool [B, n], the rows, and which of them count.
        threshold: as in `VLCache`.

    Returns:
        The attention that every column receives, summed over rows and query group, [B, H, C], and 1 - g, float64 [B].
    """
    batch, heads, columns, _ = view.keys.shape
    queries = view.query.shape[1]
    step = max(1, _TILE // (batch * queries * columns))
    sums: Tensor | None = None
    dense, pairs = torch.zeros(2, batch, dtype=torch.int64, device=rows.device)
    for start in range(0, rows.shape[1], step):
        part, counted = rows[:, start : start + step], valid[:, start : start + step]
        counted = counted & (part >= view.first_row)
        probs = attention_rows(view.query, view.keys, part, view.scaling, view.visible, counted)  # [B, H, G, n, C]
        if view.visible is None:
            seen = (torch.arange(columns, device=rows.device) <= part[..., None])[:, None]
        else:
            seen = view.visible(part.clamp_min(view.first_row)).expand(batch, -1, part.shape[1], columns)
        seen = seen & counted[:, None, :, None]
        large = (probs >= threshold * probs.amax(-1, keepdim=True)) & seen[:, :, None]
        dense += large.sum((1, 2, 3, 4))
        pairs += seen.sum((1, 2, 3)) * (queries // seen.shape[1])
        received = probs.sum((2, 3))
        sums = received if sums is None else sums + received
    if sums is None:
        sums = view.keys.new_zeros(batch, heads, columns)
    return sums, dense.double() / pairs.clamp_min(1)

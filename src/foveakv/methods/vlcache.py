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

LEAST = 0.01  # the least share of the prompt that a layer keeps, where the budget can pay it
_TILE = 2**21  # most probabilities that are formed at once


@dataclass
class VLCacheState(State):
    """rows, valid: the post-vision rows [B, n]. scores [B, H, C] and density [B] of every layer, during the prefill.

    sparsity: float64 [B, L]. tokens: int64 [B, L], per head.
    """

    rows: Tensor
    valid: Tensor
    scores: list[Tensor] = field(default_factory=list)
    density: list[Tensor] = field(default_factory=list)
    sparsity: Tensor | None = None
    tokens: Tensor | None = None


@dataclass
class VLCache(Method):
    """Dense layers get more, sparse ones less; per head, the tokens that the text behind the pictures looks at.

    Post-vision attention is that of the prompt's tokens behind the last visual one. A layer's sparsity g is the share
    of its entries, over all heads, below `threshold` times their row's maximum (the paper's ThresholdFilter); hidden
    pairs do not count. Layers share the budget in proportion to 1 - g (its sparsity-aware cache budget allocation), and
    in each head the tokens with the largest sum of post-vision attention stay (its modality-aware token scoring). All
    layers are known only at the end of the prompt, so the peak is that of a full cache.

    Not stated in the paper, or not clearly; we
    - keep the newest tokens for `recent` of the mean budget in every layer, inside the budget;
    - let a KV head rank for itself, by the sum over its query group;
    - give a layer at least 1% of the prompt and one token, and at most the prompt, and hand on what that leaves;
    - take the last token's row where nothing follows the last picture, and all rows of a prompt without pictures.

    Args:
        budget: slots of all layers and heads together: share of the prompt, tokens per head on average, or bytes.
        threshold: the paper's p.
        recent: share of the mean budget.
    """

    budget: float | int | str = 0.2
    threshold: float = 0.01
    recent: float = 0.1

    name: ClassVar[str] = "vlcache"

    def __post_init__(self) -> None:
        parse_budget(self.budget)
        share(self.name, "threshold", self.threshold, meaning="of a row's maximum: what lies below is sparse")
        share(self.name, "recent", self.recent, meaning="of the mean budget, for the newest tokens")

    @property
    def observes(self) -> Observes:
        return Observes(queries="text")

    @property
    def decides(self) -> tuple[When, ...]:
        return ("after_prefill",)

    def begin(self, request: PromptView) -> VLCacheState:
        return VLCacheState(*post_vision_rows(request.prompt))

    def prefill(self, view: PrefillView) -> None:
        state: VLCacheState = view.state
        scores, density = post_vision(view, state.rows, state.valid, self.threshold)
        state.scores.append(scores)
        state.density.append(density)

    def after_prefill(self, view: PromptEndView) -> list[Decision]:
        state: VLCacheState = view.state
        request, real = view.request, view.request.prompt.real
        geometry, layers = request.geometry, len(request.layers)
        density = torch.stack(state.density, 1).double().cpu()  # [B, L]
        totals = (request.budget_slots(self.budget) // geometry.kv_heads).tolist()  # tokens over all layers
        contexts = [int(context) for context in geometry.contexts]
        sizes = torch.stack([layer_tokens(density[b], totals[b], context) for b, context in enumerate(contexts)])
        mean = torch.tensor([int(total / layers * self.recent + 1e-9) for total in totals]).to(real.device)
        decisions = []
        for layer, received in enumerate(state.scores):
            size = sizes[:, layer].to(real.device)
            window = newest(real, torch.minimum(mean, size))  # [B, C]
            score = received.masked_fill((window | ~real)[:, None], -torch.inf)
            decisions.append(Decision(keep=keep_top(score, (size - window.sum(-1))[:, None]) | window[:, None]))
        state.scores, state.density = [], []
        state.sparsity, state.tokens = 1 - density, sizes
        return decisions

    def results(self, view: ResultView) -> Results:
        """Sparsity and tokens per head of every layer, for each sequence."""
        sparsity, tokens = view.state.sparsity, view.state.tokens
        if sparsity is None or tokens is None:
            return Results()
        return Results({"sparsity": sparsity.tolist(), "tokens": tokens.tolist()}, layer_tokens=tokens)


def layer_tokens(density: Tensor, total: int, context: int) -> Tensor:
    """Tokens per head of every layer, int64 [L], which sum to `total` (or to what the layers can hold).

    density: [L] float64, 1 - g. total: tokens of all layers together. context: prompt tokens.
    """
    layers = density.numel()
    total = min(total, layers * context)
    least = max(1, min(int(LEAST * context), total // layers))
    return share_out(density / density.sum(), total, least, context)


def post_vision_rows(prompt: PromptMap) -> tuple[Tensor, Tensor]:
    """The rows behind the last visual token: columns [B, n] int64, which of them count [B, n] bool."""
    real = prompt.real
    columns = torch.arange(prompt.columns, device=real.device)
    last = torch.where(prompt.visual, columns, -1).amax(-1, keepdim=True)
    behind = real & (columns > last)
    behind |= newest(real, (~behind.any(-1)).long())  # at least one row
    counts = behind.sum(-1)
    most = int(counts.max())
    return real_first(behind)[:, :most], torch.arange(most, device=real.device) < counts[:, None]


def post_vision(view: PrefillView, rows: Tensor, valid: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    """What rows [B, n] give to every column, summed over rows and group [B, H, C], and the layer's 1 - g, [B]."""
    batch, heads, columns, _ = view.keys.shape
    queries = view.query.shape[1]
    step = max(1, _TILE // (batch * queries * columns))
    sums: Tensor | None = None
    dense, pairs = torch.zeros(2, batch, dtype=torch.int64, device=rows.device)
    for start in range(0, rows.shape[1], step):
        part, counted = rows[:, start : start + step], valid[:, start : start + step]
        probs = attention_rows(view.query, view.keys, part, view.scaling, view.visible, counted)  # [B, H, G, n, C]
        if view.visible is None:
            seen = torch.arange(columns, device=rows.device) <= part[..., None]
        else:
            seen = view.visible(part)[:, 0].expand(batch, part.shape[1], columns)
        seen = seen & counted[..., None]
        large = (probs >= threshold * probs.amax(-1, keepdim=True)) & seen[:, None, None]
        dense += large.sum((1, 2, 3, 4))
        pairs += seen.sum((1, 2)) * queries
        received = probs.sum((2, 3))
        sums = received if sums is None else sums + received
    if sums is None:
        sums = view.keys.new_zeros(batch, heads, columns)
    return sums, dense.double() / pairs.clamp_min(1)

"""TGV-KV: text-guided visual tokens and layer budgets (arXiv 2606.03075)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from foveakv.core.allocation import share_out
from foveakv.core.attention_stats import attention_rows, text_rows
from foveakv.core.budget import parse_budget
from foveakv.core.columns import newest
from foveakv.core.prompt import PromptMap
from foveakv.methods.base import Method
from foveakv.methods.checks import flag, share, whole_number
from foveakv.methods.results import Results
from foveakv.methods.text_first import text_first, text_note
from foveakv.methods.views import (
    Decision,
    Further,
    Granularity,
    Observes,
    PrefillView,
    PromptEndView,
    PromptView,
    ResultView,
    State,
    When,
)

_TILE = 2**21  # the most probabilities computed at once


@dataclass
class TGVKVState(State):
    """State of one request.

    rows, valid: the text rows, int64 and bool [B, n]. scores: [B, C] per layer, during the prefill. guidance: float64
    [B] per layer, the attention from text to images. tokens: int64 [B, L], tokens per head.
    """

    rows: Tensor
    valid: Tensor
    scores: list[Tensor] = field(default_factory=list)
    guidance: list[Tensor] = field(default_factory=list)
    tokens: Tensor | None = None


@dataclass
class TGVKV(Method):
    """Keep text, then the visual tokens that the important text attends to; layers share by attention to images.

    Rows are those of the text after the first visual token, and attention is averaged over heads. A text token weighs
    as much as the later rows attend to it on average. The score of a visual token is the sum over rows of weight times
    attention, and that of a text token the sum of attention. Text is kept first. Layers share the slots that text
    leaves in proportion to the attention from text to visual tokens. All heads of a layer keep the same tokens, and no
    layer can be pruned before all have been read, so the peak memory is that of a full cache.

    Not stated in the paper, or not clearly; we
    - count a row for a text token if the token is visible to it, the token's own row included;
    - let layers share only what text leaves, each at most the prompt; the slots of text and the newest token are equal;
    - read several images as one set of visual tokens, with the text between them as text;
    - never evict decoded tokens.

    Args:
        budget: slots over all layers and heads: a share of the prompt, tokens per head on average, or bytes.
        sink: first tokens that are always kept (4 in the authors' code).
        layer_budgets: share what text leaves among layers by attention; False gives every layer the same.
        visual_share: the share of the budget that text leaves to visual tokens (not in the paper; 0 gives text
            everything).
    """

    budget: float | int | str = 0.2
    sink: int = 4
    layer_budgets: bool = True
    visual_share: float = 0.0

    name: ClassVar[str] = "tgvkv"

    def __post_init__(self) -> None:
        parse_budget(self.budget)
        whole_number(self.name, "sink", self.sink, 0, "first tokens that are always kept")
        flag(self.name, "layer_budgets", self.layer_budgets)
        share(self.name, "visual_share", self.visual_share, meaning="of the budget that text leaves to visual tokens")

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
        """Evicts after the last layer's prefill."""
        return ("after_prefill",)

    @property
    def further(self) -> Further:
        """Each block gets layer sizes of its own."""
        return "block"

    def begin(self, request: PromptView) -> TGVKVState:
        """Select the text rows."""
        return TGVKVState(*text_rows(request.prompt, max_rows=None))

    def prefill(self, view: PrefillView) -> None:
        """Score the tokens of one layer."""
        state: TGVKVState = view.state
        scores, guidance = guided_scores(view, state.rows, state.valid)
        state.scores.append(scores)
        state.guidance.append(guidance)

    def after_prefill(self, view: PromptEndView) -> list[Decision]:
        """Give layers their sizes and select their tokens."""
        state: TGVKVState = view.state
        request, prompt = view.request, view.request.prompt
        state.tokens = self._sizes(request, torch.stack(state.guidance, 1).double().cpu())
        recent = torch.ones_like(prompt.lengths)[:, None]
        first = prompt.real & (prompt.real.cumsum(-1) <= self.sink)
        decisions = []
        for layer, score in enumerate(state.scores):
            size = state.tokens[:, layer, None].to(score.device)
            score = score.masked_fill(first, torch.inf)  # before other text; a sink that is visual ranks first there
            keep = text_first(
                score[:, None], prompt.text, prompt.real, size, torch.minimum(recent, size), self.visual_share
            )
            decisions.append(Decision(keep=keep))
        state.scores, state.guidance = [], []
        return decisions

    def _sizes(self, request: PromptView, guidance: Tensor) -> Tensor:
        """Return the tokens per head of every layer: int64 [B, L]; guidance: float64 [B, L]."""
        geometry, layers = request.geometry, len(request.layers)
        totals = (request.budget_slots(self.budget) // geometry.kv_heads).tolist()
        text = self._text(request.prompt).tolist()
        sizes = []
        for b, context in enumerate(int(c) for c in geometry.contexts):
            total = min(totals[b], layers * context)
            least = min(total // layers, text[b])
            weights = guidance[b] if self.layer_budgets else torch.ones(layers, dtype=torch.float64)
            if float(weights.sum()) <= 0:
                weights = torch.ones(layers, dtype=torch.float64)
            extra = share_out(weights / weights.sum(), total - least * layers, 0, context - least)
            sizes.append(extra + least)
        return torch.stack(sizes)

    def _text(self, prompt: PromptMap) -> Tensor:
        """Return the tokens that come before all visual ones, text and the newest: int64 [B]."""
        return (prompt.text | newest(prompt.real, torch.ones_like(prompt.lengths))).sum(-1)

    def results(self, view: ResultView) -> Results:
        """Return the tokens per head of every layer, and a note if the budget does not hold all text."""
        request, tokens = view.request, view.state.tokens
        if tokens is None:
            return Results()
        figures: dict[str, Any] = {"tokens": tokens.tolist()}
        needed = request.prompt.text.sum(-1) * request.prompt.visual.any(-1)
        size = request.budget_tokens(self.budget)
        return Results(figures, layer_tokens=tokens, notes=text_note(needed, size, self.visual_share))


def guided_scores(view: PrefillView, rows: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """Score the columns of one layer by text rows.

    Args:
        view: the layer.
        rows, valid: int64 and bool [B, n], the text rows, and which of them count.

    Returns:
        float [B, C]: for a visual column the sum over rows of the row's weight times its attention, for another column
        the sum of attention. float64 [B]: the attention from the rows to all visual columns.
    """
    batch, columns, queries = len(view.keys), view.keys.shape[2], view.query.shape[1]
    step = max(1, _TILE // (batch * queries * columns))
    spans = [(rows[:, i : i + step], valid[:, i : i + step]) for i in range(0, rows.shape[1], step)]

    def attention(part: Tensor, counted: Tensor) -> Tensor:
        probs = attention_rows(view.query, view.keys, part, view.scaling, view.visible, counted)
        return probs.mean((1, 2))  # [B, n, C]

    dtype = torch.float64 if view.keys.dtype == torch.float64 else torch.float32
    sums, seeing = torch.zeros(2, batch, columns, dtype=dtype, device=view.keys.device)
    for part, counted in spans:
        sums += attention(part, counted).sum(1)
        if view.visible is None:
            seen = torch.arange(columns, device=rows.device) <= part[..., None]
        else:
            seen = view.visible(part).any(1)
        seeing += (seen & counted[..., None]).sum(1)
    weights = sums / seeing.clamp_min(1)
    guided = torch.zeros_like(sums)
    for part, counted in spans:
        guided += (attention(part, counted) * weights.gather(1, part)[..., None]).sum(1)
    visual = view.prompt.visual
    return torch.where(visual, guided, sums), (sums * visual).sum(-1).double()

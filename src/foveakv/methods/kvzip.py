"""KVzip: keep the tokens that the model needs to repeat its context (Kim et al., arXiv 2505.23416)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor

from foveakv.core.budget import parse_budget
from foveakv.core.selection import keep_top
from foveakv.methods.base import Method
from foveakv.methods.checks import choice
from foveakv.methods.views import Decision, Further, Observes, PrefillView, PromptEndView, PromptView, State, When

_TILE = 2**21  # the most probabilities computed at once


@dataclass
class KVzipState(State):
    """State of one request. scores: [B, H, C] per layer, during the prefill."""

    scores: list[Tensor] = field(default_factory=list)


@dataclass
class KVzip(Method):
    """Keep the slots that receive the most attention while the model reads the prompt a second time.

    A slot's score is the largest attention probability that any query of the repetition gives it, over rows and the
    query group. The score does not depend on a question, so one compressed prompt serves many questions.

    Not stated in the paper, or different from it; we
    - repeat the prompt itself, without an instruction to repeat it, and in one piece;
    - compute the probabilities over the prompt's own columns and the repeated ones before the row.

    Args:
        budget: slots to keep: a share of the prompt, tokens per head on average, or bytes.
        allocation: "global" ranks all slots of all layers and heads together, as the paper does; "layer" those of a
            layer; "head" those of a head.
    """

    budget: float | int | str = 0.2
    allocation: Literal["global", "layer", "head"] = "global"

    name: ClassVar[str] = "kvzip"

    def __post_init__(self) -> None:
        parse_budget(self.budget)
        choice(self.name, "allocation", self.allocation, ("global", "layer", "head"))

    @property
    def observes(self) -> Observes:
        """A second pass over the prompt."""
        return Observes(second_pass=True)

    @property
    def decides(self) -> tuple[When, ...]:
        """Evicts after the last layer, or with another allocation than "global" after each layer."""
        return ("after_prefill",) if self.allocation == "global" else ("prefill",)

    @property
    def further(self) -> Further:
        """Kept whole: the second pass reads the first prompt only."""
        return "keep"

    def begin(self, request: PromptView) -> KVzipState:
        """Return an empty state."""
        return KVzipState()

    def prefill(self, view: PrefillView) -> Decision | None:
        """Score the slots of one layer, and keep the best unless layers are ranked together."""
        score = repetition_scores(view).masked_fill(~view.candidates, -torch.inf)
        if self.allocation == "global":
            view.state.scores.append(score)
            return None
        size = view.budget_tokens(self.budget)
        if self.allocation == "head":
            return Decision(keep=keep_top(score, size[:, None]))
        return Decision(keep=keep_top(score.flatten(1), size * score.shape[1]).view(score.shape))

    def after_prefill(self, view: PromptEndView) -> list[Decision] | None:
        """Keep the best slots of all layers and heads."""
        state: KVzipState = view.state
        if not state.scores:
            return None
        scores, state.scores = torch.stack(state.scores, 1), []  # [B, L, H, C]
        slots = view.request.budget_slots(self.budget).to(scores.device)
        keep = keep_top(scores.flatten(1), slots).view(scores.shape)
        return [Decision(keep=keep[:, layer]) for layer in range(keep.shape[1])]


def repetition_scores(view: PrefillView) -> Tensor:
    """Return the largest probability that the second pass gives to every column of the prompt: [B, H, C].

    Row c of the second pass attends to all real columns of the prompt and to columns 0 ... c of its own keys.

    Raises:
        ValueError: the view has no second pass.
    """
    if view.repeated is None:
        raise ValueError("the scores of a repetition need an engine's second pass over the prompt")
    batch, heads, columns, _ = view.keys.shape
    group = view.query.shape[1] // heads
    query = view.repeated.query.unflatten(1, (heads, group))
    real = view.prompt.real
    dtype = torch.float64 if view.keys.dtype == torch.float64 else torch.float32
    scores = torch.zeros(batch, heads, columns, dtype=dtype, device=view.keys.device)
    step = max(1, _TILE // (2 * columns * group * heads * batch))
    place = torch.arange(columns, device=real.device)
    prompt, own = view.keys.to(dtype)[:, :, None].mT, view.repeated.keys.to(dtype)[:, :, None].mT
    for start in range(0, columns, step):
        rows = query[..., start : start + step, :].to(dtype)
        at = place[start : start + step]
        before = real[:, None] & (place <= at[:, None])  # [B, n, C]
        seen = torch.cat([real[:, None].expand_as(before), before], -1)[:, None, None]
        logits = torch.cat([rows @ prompt, rows @ own], -1) * view.scaling
        probs = logits.masked_fill(~seen, -torch.inf).softmax(-1)[..., :columns]
        probs = probs.masked_fill(~real[:, None, None, at, None], 0)
        scores = torch.maximum(scores, probs.amax((2, 3)))
    return scores

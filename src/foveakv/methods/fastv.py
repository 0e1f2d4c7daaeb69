"""FastV: after two layers, keep the visual tokens that the last token looks at (Chen et al., arXiv 2403.06764)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from foveakv.core.attention_stats import attention_rows
from foveakv.core.selection import keep_top
from foveakv.errors import MethodError
from foveakv.methods.base import Method
from foveakv.methods.checks import flag, share, whole_number
from foveakv.methods.views import Decision, Granularity, Observes, PrefillView, PromptView, State


@dataclass
class FastVState(State):
    """keep: bool [B, C], the columns that later layers keep; None until the scoring layer has chosen."""

    keep: Tensor | None = None


@dataclass
class FastV(Method):
    """The first `layer` layers keep everything; all later ones lose the `ratio` least attended visual tokens.

    A token's score is the attention that the prompt's last token pays to it in the `layer`-th layer, averaged over
    heads (Sec. 4). Layers are counted from 1 among those with a compressed cache, so with layer=2 the second layer
    scores and the third is the first that drops (the paper filters "after layer K" and does not say more).

    Args:
        layer: K.
        ratio: R, the share of each sequence's visual tokens that go, rounded down.
        drop_hidden_states: pruned tokens also leave the residual stream (as in the paper's inference without a cache);
            False drops them from the later layers' caches only.
    """

    layer: int = 2
    ratio: float = 0.5
    drop_hidden_states: bool = False

    name: ClassVar[str] = "fastv"
    visual_only: ClassVar[bool] = True

    def __post_init__(self) -> None:
        whole_number(self.name, "layer", self.layer, 1, "layers are counted from 1")
        share(self.name, "ratio", self.ratio, above_zero=True, meaning="the share of visual tokens to drop")
        flag(self.name, "drop_hidden_states", self.drop_hidden_states)

    @property
    def granularity(self) -> Granularity:
        return "layer"

    @property
    def observes(self) -> Observes:
        return Observes(queries="window")

    @property
    def prunes_after(self) -> int | None:
        return self.layer - 1 if self.drop_hidden_states else None

    def needs_queries(self, compressed_idx: int) -> bool:
        return compressed_idx == self.layer - 1

    def begin(self, request: PromptView) -> FastVState:
        layers = len(request.layers)
        if self.layer >= layers:
            raise MethodError(
                f"fastv: layer={self.layer} leaves no later layer to prune; this model compresses {layers}"
            )
        return FastVState()

    def prefill(self, view: PrefillView) -> Decision | None:
        state: FastVState = view.state
        scoring = self.layer - 1
        if view.compressed_idx == scoring:
            state.keep = self._choose(view)
            return Decision(stream=state.keep if self.drop_hidden_states else None)
        if view.compressed_idx < scoring or state.keep is None:
            return None
        return Decision(keep=state.keep.gather(1, view.positions)[:, None])

    def _choose(self, view: PrefillView) -> Tensor:
        """The columns that stay in later layers: bool [B, C]."""
        prompt = view.prompt
        columns = torch.arange(prompt.columns, device=view.keys.device)
        last = torch.where(prompt.real, columns, 0).amax(-1, keepdim=True)  # [B, 1]
        rows = attention_rows(view.query, view.keys, last, view.scaling, view.visible)  # [B, H, G, 1, C]
        score = rows.mean(dim=(1, 2))[:, 0]
        counts = prompt.visual.sum(-1)
        dropped = torch.tensor([math.floor(self.ratio * n + 1e-9) for n in counts.tolist()], device=counts.device)
        kept = keep_top(score.masked_fill(~prompt.visual, -torch.inf), counts - dropped)
        return prompt.real & (kept | ~prompt.visual)

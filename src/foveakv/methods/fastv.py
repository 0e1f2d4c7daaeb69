"""FastV: prune visual tokens after an early layer by the last token's attention (Chen et al., arXiv 2403.06764)."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, field
from numbers import Integral
from typing import ClassVar

import torch
from torch import Tensor

from foveakv.core.attention_stats import attention_rows
from foveakv.core.selection import keep_top
from foveakv.errors import MethodError
from foveakv.methods.base import Method, ModelFacts
from foveakv.methods.checks import flag, share, whole_number
from foveakv.methods.contexts import at_view, grown, in_context
from foveakv.methods.results import Results
from foveakv.methods.score_layers import Chosen, check_layers, choose_layers, named_layers
from foveakv.methods.views import Decision, Granularity, Observes, PrefillView, PromptView, ResultView, State


@dataclass
class FastVState(State):
    """State of one request.

    keep: bool [B, N], the columns of the context that later layers keep; None before the scoring layer. before: the
    same before a further block, with its columns.
    """

    keep: Tensor | None = None
    before: Tensor | None = None


@dataclass
class FastV(Method):
    """Keep everything in the first `layer` layers and evict the `ratio` least attended visual tokens in all later ones.

    A token's score is the attention it receives from the last prompt token in the `layer`-th layer, averaged over heads
    (Sec. 4). Layers are counted from 1 among the compressed layers: with layer=2 the second layer scores and the third
    is the first that evicts (the paper filters "after layer K" and is no more specific).

    Args:
        layer: K; or (not in the paper) the scoring layer as a share of the depth, "calibrated", or a calibration file,
            as `score_layer` of HAE.
        ratio: R, the share of each sequence's visual tokens to evict, rounded down.
        drop_hidden_states: also prune these tokens from the residual stream (as in the paper's inference without a
            cache); False evicts them from the caches of the later layers only.

    Raises:
        MethodError: an option is invalid, or the model has no layer after `layer`.
    """

    layer: int | float | str = 2
    ratio: float = 0.5
    drop_hidden_states: bool = False
    _chosen: Chosen | None = field(default=None, init=False, repr=False, compare=False)

    name: ClassVar[str] = "fastv"
    visual_only: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if isinstance(self.layer, (float, str)):
            check_layers(self.name, "layer", self.layer)
            if named_layers(self.layer) is not None:
                raise MethodError(
                    'fastv: layer must be K, a whole number from 1 (2), a share of the depth (0.5), "calibrated" or a '
                    f"calibration file; got {self.layer!r}"
                )
        else:
            whole_number(self.name, "layer", self.layer, 1, "layers are counted from 1")
        share(self.name, "ratio", self.ratio, above_zero=True, meaning="the share of visual tokens to evict")
        flag(self.name, "drop_hidden_states", self.drop_hidden_states)

    def for_model(self, model: ModelFacts) -> FastV:
        """Find the scoring layer in the model where `layer` is no number."""
        if isinstance(self.layer, Integral):
            return self
        made = copy.copy(self)
        made._chosen = choose_layers(self.name, "layer", self.layer, model)
        return made

    @property
    def _scoring(self) -> int:
        """Index of the scoring layer; 0 as long as it depends on an unknown model, see `Method.for_model`."""
        if isinstance(self.layer, Integral):
            return int(self.layer) - 1
        return 0 if self._chosen is None else self._chosen.single

    @property
    def granularity(self) -> Granularity:
        """The layers up to K and those after it store different tokens."""
        return "layer"

    @property
    def observes(self) -> Observes:
        """The query row of the last prompt token."""
        return Observes(queries="window")

    @property
    def prunes_after(self) -> int | None:
        """The scoring layer, with `drop_hidden_states`."""
        return self._scoring if self.drop_hidden_states else None

    def needs_queries(self, compressed_idx: int) -> bool:
        """True for the scoring layer only."""
        return compressed_idx == self._scoring

    def begin(self, request: PromptView) -> FastVState:
        """Check that the model has a layer to prune."""
        layers = len(request.layers)
        if self._scoring >= layers - 1:
            raise MethodError(
                f"fastv: layer={self.layer} leaves no later layer to prune; this model compresses {layers}"
            )
        return FastVState()

    def continue_context(self, request: PromptView, state: State | None) -> FastVState:
        """Remember what later layers store."""
        made = self.begin(request)
        if isinstance(state, FastVState) and state.keep is not None:
            made.before = grown(state.keep, request.prompt.columns, True)
        return made

    def prefill(self, view: PrefillView) -> Decision | None:
        """Select visual tokens in the scoring layer and evict the others in all later layers."""
        state: FastVState = view.state
        scoring = self._scoring
        if view.compressed_idx == scoring:
            state.keep = self._choose(view)
            return Decision(stream=state.keep if self.drop_hidden_states and view.stored is None else None)
        if view.compressed_idx < scoring or state.keep is None:
            return None
        return Decision(keep=at_view(state.keep, view)[:, None] & view.candidates)

    def results(self, view: ResultView) -> Results:
        """Return `layer`, K in this model, and where it comes from."""
        source = "" if self._chosen is None else self._chosen.source
        notes = (f"fastv: layer {self._scoring + 1} scores; from {source}",) if source else ()
        return Results({"layer": self._scoring + 1}, notes=notes)

    def _choose(self, view: PrefillView) -> Tensor:
        """Select the columns of the context that later layers keep: bool [B, N].

        In a further block, this layer stores the whole context; visual tokens that later layers have evicted are out.
        """
        prompt, before = view.prompt, view.state.before
        columns = torch.arange(prompt.columns, device=view.keys.device)
        last = torch.where(prompt.real, columns, 0).amax(-1, keepdim=True)  # [B, 1]
        rows = attention_rows(view.query, view.keys, last, view.scaling, view.visible)  # [B, H, G, 1, C]
        score = rows.mean(dim=(1, 2))[:, 0]
        counts = prompt.visual.sum(-1)
        dropped = torch.tensor([math.floor(self.ratio * n + 1e-9) for n in counts.tolist()], device=counts.device)
        left = prompt.visual if before is None else prompt.visual & at_view(before, view)
        kept = keep_top(score.masked_fill(~left, -torch.inf), counts - dropped)
        kept = torch.where(last >= view.first_row, kept, left)  # nothing scores in a block of padding
        return in_context(prompt.real & (kept | ~prompt.visual), view)

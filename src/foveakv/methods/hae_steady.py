"""Reduction of a prompt, or of a further block with what is stored, to the steady size of DDES."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from foveakv.methods.contexts import in_context
from foveakv.methods.ddes import RecycleBin
from foveakv.methods.hae_state import HAEState, Sizes, Waiting
from foveakv.methods.shared_bin import SharedState
from foveakv.methods.views import Decision, PrefillView


@dataclass(frozen=True)
class SteadySize:
    """The rules. For the options see `foveakv.methods.hae.HAE`; ranks: the recycle bin's order."""

    ranks: RecycleBin
    budget: float | int | str | None
    recent: int | None
    sink: int
    compress_prompt: bool
    candidates: str

    def sizes(self, view: PrefillView, keep: Tensor) -> Sizes:
        """Return the sizes where a layer keeps columns [B, C] before it is reduced."""
        steady = None if self.budget is None else view.budget_tokens(self.budget, steady=True).cpu()
        return Sizes.of(keep.sum(-1).cpu(), steady, self.recent, self.sink, shrink=self.compress_prompt)

    def reduced(self, state: HAEState, sums: Tensor, keep: Tensor, sizes: Sizes) -> Tensor:
        """Add the next layer's bin and return the columns that it stores: bool [B, H, C]."""
        keep = keep.expand(-1, sums.shape[1], -1)
        if sizes.longer:
            keep = self._shrunk(state, sums, keep, sizes)
        state.bins.add_layer(sizes.steady, sizes.recent, self._prompt_slots(sizes))
        return keep

    def settled(self, view: PrefillView, waiting: Waiting, sizes: Sizes) -> Decision:
        """Decide for one layer that has waited for the deciding one, of which `view` is and whose sizes are given."""
        state: HAEState = view.state
        keep = state.keep.gather(1, waiting.positions.clamp_min(0))[:, None] & waiting.candidates
        own = sizes if view.stored is None else self.sizes(view, keep[:, 0])
        return Decision(keep=self.reduced(state, waiting.sums, keep, own))

    def shared(self, view: PrefillView, keep: Tensor, sizes: Sizes, factor: float) -> Tensor:
        """Reduce columns [B, 1, C] of all layers by shared scores, and create their state.

        factor: one scoring layer's sums stand for those of so many layers, which are added while decoding.
        """
        state: HAEState = view.state
        sums, before = state.sums, state.shared
        if sums is None:
            return keep
        if before is not None:
            sums = sums + before.at_view(view) / factor
        if sizes.longer:
            keep = self._shrunk(state, sums[:, None], keep, sizes)
            state.keep = in_context(keep[:, 0], view)
        prompt = self._prompt_slots(sizes)
        state.shared = SharedState.of(sums * factor, keep[:, 0], sizes.steady, sizes.recent, prompt, before)
        state.sums = None
        return keep

    def _shrunk(self, state: HAEState, sums: Tensor, keep: Tensor, sizes: Sizes) -> Tensor:
        """Reduce columns [B, H, C] to the steady size, and count what this evicts."""
        before = int(keep.sum())
        keep = self.ranks.shrink(sums, keep, sizes.steady, sizes.recent)
        state.figures["evicted_prompt"] = state.figures.get("evicted_prompt", 0) + before - int(keep.sum())
        return keep

    def _prompt_slots(self, sizes: Sizes) -> Tensor | None:
        return sizes.stored if self.candidates == "prompt" else None

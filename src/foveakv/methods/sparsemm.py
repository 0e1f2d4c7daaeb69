"""SparseMM: larger budgets for visual heads (Wang et al., arXiv 2506.05344)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from foveakv.core.allocation import share_out
from foveakv.core.selection import keep_top
from foveakv.errors import MethodError
from foveakv.methods.checks import share
from foveakv.methods.head_files import load_head_scores, read_head_scores
from foveakv.methods.snapkv import SnapKV
from foveakv.methods.views import Decision, PrefillView, PromptView, State

_HOW = (
    "make a file with `foveakv analyze visual-heads` (foveakv.analysis.head_scores.visual_head_scores), give its path"
)


@dataclass
class SparseMMState(State):
    """State of one request. beyond: int64 [B, L, H], slots of every head in addition to the window."""

    beyond: Tensor


@dataclass
class SparseMM(SnapKV):
    """Select tokens as SnapKV does, with a budget for every head of every layer by its visual score.

    The budget of a head has three parts: the window; an equal share of `ratio` of the slots that remain after the
    window; and a share of the other slots in proportion to its visual score, over all heads of all layers (the paper's
    section on SparseMM: local window cache, uniform-based cache, score-preferred cache). Scores are measured once per
    model and read from a file.

    Not stated in the paper; we make the sum of all budgets equal to the total, clip a head at the length of its prompt
    and redistribute the surplus in proportion, and share equally if all scores are 0. The score of a KV head is the sum
    over its query heads, as in the authors' code.

    Args:
        budget, window, kernel, window_share: as in `SnapKV`; the budget is the mean over heads.
        head_scores: a file written by `foveakv.analysis.head_scores.save_head_scores` (.json or .safetensors), or
            non-negative numbers `[layers, KV heads]` with one row for every layer of the decoder.
        ratio: share of the slots in addition to the window that is split equally among all heads.

    Raises:
        MethodError: an option is invalid, the file cannot be read, or its scores do not fit the model.
    """

    head_scores: str | Path | Sequence[Sequence[float]] | Tensor | None = None
    ratio: float = 0.1
    _scores: Tensor = field(init=False, repr=False, compare=False)

    name: ClassVar[str] = "sparsemm"

    def __post_init__(self) -> None:
        super().__post_init__()
        share(self.name, "ratio", self.ratio, meaning="of the slots besides the window, split equally among heads")
        self._scores = self._read()  # read once: errors are raised here, and later changes of the file have no effect

    def _read(self) -> Tensor:
        """Return the scores [layers, KV heads], float64, not negative."""
        if self.head_scores is None:
            raise MethodError(f"sparsemm: head_scores must be given; {_HOW}")
        if isinstance(self.head_scores, (str, Path)):
            return load_head_scores(self.head_scores)
        return read_head_scores(self.head_scores, "sparsemm: head_scores")

    def begin(self, request: PromptView) -> SparseMMState:
        """Check that the scores fit the model and allocate a budget to every head."""
        geometry, scores = request.geometry, self._scores
        if scores.shape != (request.decoder_layers, geometry.kv_heads):
            raise MethodError(
                f"sparsemm: head_scores are for {scores.shape[0]} layers with {scores.shape[1]} KV heads each, and "
                f"this model has {request.decoder_layers} with {geometry.kv_heads}; {_HOW}"
            )
        scores = scores[list(request.layers)]
        size = request.budget_tokens(self.budget).cpu()
        window = self.window_tokens(request, size)
        pairs = zip((size - window).tolist(), (torch.tensor(geometry.contexts) - window).tolist(), strict=True)
        return SparseMMState(torch.stack([head_budgets(scores, mean, most, self.ratio) for mean, most in pairs]))

    def prefill(self, view: PrefillView) -> Decision:
        """Keep the window and each head's best-scored tokens before it."""
        size = view.budget_tokens(self.budget)
        window, score = self.window_and_scores(view, size)
        score = score.masked_fill(window | ~view.candidates, -torch.inf)
        beyond = view.state.beyond[:, view.compressed_idx].to(score.device)  # [B, H]
        return Decision(keep=keep_top(score, beyond) | window)

    def describe(self) -> dict[str, Any]:
        """Return the settings as plain values; scores given as numbers are described by their shape."""
        given = self.head_scores
        if given is not None and not isinstance(given, (str, Path)):
            layers, heads = self._scores.shape
            return {**super().describe(), "head_scores": f"{layers} x {heads} numbers"}
        return super().describe()


def head_budgets(scores: Tensor, mean: int, most: int, ratio: float) -> Tensor:
    """Return the slots of every head: int64 [L, H], at most `most` each and mean * L * H in total.

    scores: float64 [L, H]. ratio: share of the slots that is split equally.
    """
    flat = scores.flatten()
    equal = torch.full_like(flat, 1 / flat.numel())
    total = flat.sum()
    by_score = flat / total if float(total) > 0 else equal
    weights = ratio * equal + (1 - ratio) * by_score
    return share_out(weights, mean * flat.numel(), 0, most, flat).view(scores.shape)

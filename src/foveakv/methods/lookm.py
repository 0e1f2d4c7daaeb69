"""LOOK-M: text-prior eviction that merges evicted tokens into kept ones (Wan et al., arXiv 2406.18139)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from foveakv.core.budget import parse_budget
from foveakv.methods.base import Method
from foveakv.methods.checks import choice, share
from foveakv.methods.presets import Presets
from foveakv.methods.prompt_scores import check_rows, prompt_scores
from foveakv.methods.results import Results
from foveakv.methods.text_first import text_first, text_note
from foveakv.methods.views import Decision, Observes, PrefillView, ResultView

Merge = Literal["pivot", "mean", "weighted", "none"]
MERGES = ("pivot", "mean", "weighted", "none")
_TILE = 2**21  # the most similarities computed at once


@dataclass
class LookM(Presets, Method):
    """Keep the newest tokens, then text, then visual tokens by attention; merge evicted tokens into the kept ones.

    Tokens are selected per KV head. Scores sum the attention from all prompt queries; text is selected before all else
    (in the paper's text-prior eviction, its score is raised by the highest score). Each evicted key is merged into the
    kept key with the largest cosine similarity, and its value into that key's value (the paper's many-to-one matching).
    For n evicted tokens e that match kept token c, both keys and values become

    - "mean":     (c + sum of e) / (n + 1)
    - "pivot":    (c + sum of (e + c) / 2) / (n + 1)
    - "weighted": (c + sum of cosine(e, c) * e) / (n + 1)

    This happens once, at the end of the prompt ("look once"); decoded tokens are stored in addition to the budget.

    Not stated in the paper, or not clearly; we
    - sum the scores of a KV head over its query group;
    - merge rotated keys, as they are stored; a merged token keeps the position of the kept one;
    - merge all evicted tokens; the authors' code omits those of low similarity in one of the merges;
    - rank audio after text, with visual tokens; if text leaves less than `visual_share` of the budget besides the
      newest tokens to the others, we keep its best-scored tokens.

    Args:
        budget: tokens to keep, newest and others together: a share of the prompt, tokens per head, or bytes.
        recent_ratio: share of the budget for the newest tokens, rounded down, at least one token. The paper splits the
            budget evenly.
        merge: see above; "none" discards evicted tokens (the paper's text-prior eviction alone).
        visual_share: the share of the slots besides the newest tokens that text leaves to visual tokens (not in the
            paper; 0 gives text everything, as the paper's text prior does).
        prefill_rows: prompt queries that count for the scores: "all", or a number of sampled rows (not in the paper).
    """

    budget: float | int | str = 0.2
    recent_ratio: float = 0.5
    merge: Merge = "pivot"
    visual_share: float = 0.0
    prefill_rows: Literal["all"] | int = "all"

    name: ClassVar[str] = "lookm"
    presets: ClassVar[dict[str, dict[str, Any]]] = {"paper": {"visual_share": 0.0}}

    def __post_init__(self) -> None:
        parse_budget(self.budget)
        share(self.name, "recent_ratio", self.recent_ratio, meaning="the share of the budget for the newest tokens")
        share(self.name, "visual_share", self.visual_share, meaning="of the slots that text leaves to visual tokens")
        choice(self.name, "merge", self.merge, MERGES)
        check_rows(self.name, self.prefill_rows)

    @property
    def merges(self) -> bool:
        """Whether a merge is selected."""
        return self.merge != "none"

    @property
    def observes(self) -> Observes:
        """All prompt queries."""
        return Observes(queries="all")

    def prefill(self, view: PrefillView) -> Decision:
        """Select the tokens of one layer and merge the others into them."""
        prompt = view.prompt
        size = view.budget_tokens(self.budget)
        recent = (size.double() * self.recent_ratio + 1e-9).long().clamp_min(1)
        scores = prompt_scores(view, self.prefill_rows)
        keep = text_first(scores, prompt.text, view.candidates, size[:, None], recent[:, None], self.visual_share)
        if self.merge == "none":
            return Decision(keep=keep)
        keys, values = merged(view.keys, view.values, keep, view.candidates, self.merge)
        return Decision(keep=keep, keys=keys, values=values)

    def results(self, view: ResultView) -> Results:
        """Return a note if the budget does not hold all text."""
        prompt, size = view.request.prompt, view.request.budget_tokens(self.budget)
        needed = (prompt.text.sum(-1) - view.request.protected).clamp_min(0)
        needed = needed * prompt.visual.any(-1)  # text alone has nothing to come before
        return Results(notes=text_note(needed, size, self.visual_share))


def merged(keys: Tensor, values: Tensor, keep: Tensor, real: Tensor, how: str) -> tuple[Tensor, Tensor]:
    """Return copies of keys [B, H, C, D] and values [B, H, C, Dv] with evicted columns merged into the kept ones.

    The inputs are not modified, since the model may still read them. Sums are computed in float32 or float64.

    Args:
        keys, values: [B, H, C, D] and [B, H, C, Dv].
        keep: bool [B, H, C].
        real: bool [B, C], or [B, 1 or H, C]; what is not real is neither kept nor merged.
        how: "pivot", "mean" or "weighted", see `LookM`.
    """
    real = (real[:, None] if real.dim() == 2 else real).expand(keep.shape)
    keys, values = keys.clone(), values.clone()
    for b in range(keys.shape[0]):
        for h in range(keys.shape[1]):
            kept = keep[b, h].nonzero()[:, 0]
            gone = (real[b, h] & ~keep[b, h]).nonzero()[:, 0]
            if not len(gone) or not len(kept):
                continue
            cosine, place = nearest(keys[b, h, gone], keys[b, h, kept])
            for states in (keys[b, h], values[b, h]):
                states[kept] = merge_rows(wide(states[kept]), wide(states[gone]), cosine, place, how).to(states.dtype)
    return keys, values


def merge_rows(kept: Tensor, gone: Tensor, cosine: Tensor, place: Tensor, how: str) -> Tensor:
    """Merge rows gone [n, D] into rows kept [m, D] at int64 place [n]; cosine: [n]. Returns [m, D]."""
    if how == "pivot":
        gone = (gone + kept[place]) / 2
    elif how == "weighted":
        gone = gone * cosine[:, None]
    counts = torch.bincount(place, minlength=len(kept)).to(kept.dtype)
    return kept.index_add(0, place, gone) / (1 + counts)[:, None]


def nearest(gone: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
    """Find for each row of gone [n, D] the row of kept [m, D] with the largest cosine: cosines [n], rows int64 [n]."""
    directions = F.normalize(wide(kept), dim=-1).T
    step = max(1, _TILE // len(kept))
    found = [(F.normalize(wide(part), dim=-1) @ directions).max(-1) for part in gone.split(step)]
    return torch.cat([best.values for best in found]), torch.cat([best.indices for best in found])


def wide(states: Tensor) -> Tensor:
    """Convert to float32; float64 is returned unchanged."""
    return states if states.dtype == torch.float64 else states.float()

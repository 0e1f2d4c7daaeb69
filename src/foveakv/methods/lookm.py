"""LOOK-M: text first, and what is evicted is merged into the most similar kept token (Wan et al., arXiv 2406.18139)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from foveakv.core.budget import parse_budget
from foveakv.core.columns import newest
from foveakv.core.selection import keep_top
from foveakv.methods.base import Method
from foveakv.methods.checks import choice, share
from foveakv.methods.prompt_scores import check_rows, prompt_scores
from foveakv.methods.views import Decision, Observes, PrefillView

Merge = Literal["pivot", "mean", "weighted", "none"]
MERGES = ("pivot", "mean", "weighted", "none")
_TILE = 2**21  # most similarities that are formed at once


@dataclass
class LookM(Method):
    """Per KV head: the newest tokens, then text by its attention, then visual tokens by theirs; the rest is merged.

    Scores sum the attention from all prompt queries; text goes before all else (the paper's text-prior eviction gives
    it the highest score on top of its own). Each evicted key goes to the kept key with the largest cosine, and its
    value to the same place (its many-to-one matching). With n tokens e evicted to kept token c, keys and values alike
    become

    - "mean":     (c + sum of e) / (n + 1)
    - "pivot":    (c + sum of (e + c) / 2) / (n + 1)
    - "weighted": (c + sum of cosine(e, c) * e) / (n + 1)

    It happens once, at the end of the prompt ("look once"); decoded tokens come on top of the budget.

    Not stated in the paper, or not clearly; we
    - let a KV head's score sum over its query group;
    - merge rotated keys, as they are stored; a merged token keeps the position of the kept one;
    - merge all evicted tokens; the authors' code leaves out those of low similarity in one of the merges;
    - put audio after text, with visual tokens; where text alone is over the budget, its best-scored tokens stay.

    Args:
        budget: tokens that stay, newest and others together: share of the prompt, tokens per head, or bytes.
        recent_ratio: the newest tokens' part of the budget, rounded down, at least one token. The paper splits evenly.
        merge: see above; "none" drops what is evicted (the paper's text-prior eviction alone).
        prefill_rows: which prompt queries count: "all", or a number of sampled rows (ours).
    """

    budget: float | int | str = 0.2
    recent_ratio: float = 0.5
    merge: Merge = "pivot"
    prefill_rows: Literal["all"] | int = "all"

    name: ClassVar[str] = "lookm"

    def __post_init__(self) -> None:
        parse_budget(self.budget)
        share(self.name, "recent_ratio", self.recent_ratio, meaning="the newest tokens' part of the budget")
        choice(self.name, "merge", self.merge, MERGES)
        check_rows(self.name, self.prefill_rows)

    @property
    def merges(self) -> bool:
        return self.merge != "none"

    @property
    def observes(self) -> Observes:
        return Observes(queries="all")

    def prefill(self, view: PrefillView) -> Decision:
        prompt = view.prompt
        size = view.budget_tokens(self.budget)
        recent = (size.double() * self.recent_ratio + 1e-9).long().clamp_min(1)
        keep = text_first(prompt_scores(view, self.prefill_rows), prompt.text, prompt.real, size, recent)
        if self.merge == "none":
            return Decision(keep=keep)
        keys, values = merged(view.keys, view.values, keep, prompt.real, self.merge)
        return Decision(keep=keep, keys=keys, values=values)


def text_first(scores: Tensor, text: Tensor, real: Tensor, size: Tensor, recent: Tensor) -> Tensor:
    """bool [B, H, C] with min(size, real columns) marks per head: the newest, then text, then the rest, each by score.

    scores [B, H, C]; text, real bool [B, C]; size, recent int64 [B], recent at most size.
    """
    window = newest(real, recent)[:, None]
    left = size[:, None] - window.sum(-1)
    best_text = keep_top(scores.masked_fill(~text[:, None] | window, -torch.inf), left)
    left = left - best_text.sum(-1)
    best_rest = keep_top(scores.masked_fill(~real[:, None] | text[:, None] | window, -torch.inf), left)
    return window | best_text | best_rest


def merged(keys: Tensor, values: Tensor, keep: Tensor, real: Tensor, how: str) -> tuple[Tensor, Tensor]:
    """Copies of keys [B, H, C, D] and values [B, H, C, Dv] in which kept columns have taken up the evicted ones.

    keep bool [B, H, C]; real bool [B, C]: padding is neither kept nor merged. how: see `LookM`. Sums are at least
    float32. The given tensors stay as they are, since the model may still read them.
    """
    keys, values = keys.clone(), values.clone()
    for b in range(keys.shape[0]):
        for h in range(keys.shape[1]):
            kept = keep[b, h].nonzero()[:, 0]
            gone = (real[b] & ~keep[b, h]).nonzero()[:, 0]
            if not len(gone) or not len(kept):
                continue
            cosine, place = nearest(keys[b, h, gone], keys[b, h, kept])
            for states in (keys[b, h], values[b, h]):
                states[kept] = merge_rows(wide(states[kept]), wide(states[gone]), cosine, place, how).to(states.dtype)
    return keys, values


def merge_rows(kept: Tensor, gone: Tensor, cosine: Tensor, place: Tensor, how: str) -> Tensor:
    """kept [m, D] after taking up gone [n, D] at place [n] int64; cosine [n]."""
    if how == "pivot":
        gone = (gone + kept[place]) / 2
    elif how == "weighted":
        gone = gone * cosine[:, None]
    counts = torch.bincount(place, minlength=len(kept)).to(kept.dtype)
    return kept.index_add(0, place, gone) / (1 + counts)[:, None]


def nearest(gone: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
    """For each row of gone [n, D] the largest cosine with a row of kept [m, D], and that row: [n], int64 [n]."""
    directions = F.normalize(wide(kept), dim=-1).T
    step = max(1, _TILE // len(kept))
    found = [(F.normalize(wide(part), dim=-1) @ directions).max(-1) for part in gone.split(step)]
    return torch.cat([best.values for best in found]), torch.cat([best.indices for best in found])


def wide(states: Tensor) -> Tensor:
    """float64 as it is, all else as float32."""
    return states if states.dtype == torch.float64 else states.float()

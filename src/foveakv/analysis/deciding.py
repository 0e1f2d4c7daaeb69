"""What every layer would lose if one layer chose the visual tokens of all of them.

HAE (arXiv 2602.02197) lets the first layer choose. This module measures each layer in that role, from the attention of
one prefill: no token is evicted and none is decoded.

Notation: B sequences, L layers, C prompt columns, V visual tokens, n query rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from foveakv.core.selection import keep_top

Rows = Literal["sum", "mean"]
ROWS: tuple[Rows, ...] = ("sum", "mean")
"""How a column's attention is combined over text rows: a_j of HAE's Eq. 1, or a_j divided by the rows that see j."""


@dataclass(frozen=True)
class Deciding:
    """Every layer as the one that decides for all; the lists have one entry per deciding layer.

    rows: see `ROWS`. kept: the share of visual tokens that are kept. best: share of the best tokens of every layer (as
    many as are kept, by its own scores) that the deciding layer's choice keeps, mean over all layers, itself included.
    lost: share of the layers' attention to visual tokens (a_j of Eq. 1 for either value of `rows`) that falls on
    evicted tokens, mean over all layers. images: share of the tokens of each image that the choice keeps, in the order
    of the prompt; empty in a mean over prompts.
    """

    rows: Rows
    kept: float
    best: list[float]
    lost: list[float]
    images: list[list[float]]


def deciding(sums: Tensor, seeing: Tensor, images: Tensor, share: float, rows: Rows) -> Deciding:
    """Let each layer keep the visual tokens with the highest scores, and measure what all layers lose.

    Args:
        sums: [L, V], a_j of every visual token in every layer.
        seeing: [V], number of text rows that can see each token.
        images: [V], number of the image or video of each token.
        share: share of the visual tokens to keep, rounded as `target_visual_tokens` of `HAE`, at least one token.
        rows: whether a_j is divided by the rows that see j.
    """
    layers, tokens = sums.shape
    count = max(1, round(share * tokens))
    sums = sums.double()
    scores = sums if rows == "sum" else sums / seeing.clamp_min(1)
    kept = keep_top(scores, torch.full((layers,), count, device=sums.device)).double()
    best = kept @ kept.T / kept.sum(1).clamp_min(1)
    attention = sums / sums.sum(1, keepdim=True).clamp_min(1e-30)
    lost = 1 - kept @ attention.T
    of_images = torch.stack([kept[:, images == image].mean(1) for image in images.unique()], 1)
    return Deciding(rows, count / tokens, best.mean(1).tolist(), lost.mean(1).tolist(), of_images.tolist())


def mean_of(found: Sequence[Deciding]) -> Deciding:
    """Return the mean over prompts; all entries have the same `rows`."""
    best, lost = (torch.tensor([getattr(each, key) for each in found]).double().mean(0) for key in ("best", "lost"))
    kept = sum(each.kept for each in found) / len(found)
    return Deciding(found[0].rows, kept, best.tolist(), lost.tolist(), [])

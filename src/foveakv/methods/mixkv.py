"""MixKV: mix importance with key diversity per head (Liu et al., arXiv 2510.20707)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from foveakv.core.selection import keep_top
from foveakv.methods.checks import choice
from foveakv.methods.snapkv import SnapKV
from foveakv.methods.views import Decision, PrefillView


@dataclass
class MixKV(SnapKV):
    """Keep important tokens in every KV head and, in heads with redundant keys, also tokens with distinctive keys.

    Importance is SnapKV's score plus the norm of the token's value. Diversity is minus the cosine similarity between
    the token's key and the mean direction of the head's keys. Norm and diversity are scaled to [0, 1] and then to the
    mean of SnapKV's score. They are mixed by the head's redundancy r, the mean cosine similarity of its pairs of keys:
    r * diversity + (1 - r) * importance.

    Not stated in the paper; we clip r at 0, use keys after RoPE, as they are stored, and count all real tokens for r
    and the mean direction, and the tokens before the window for the rest.

    Args:
        budget, window, kernel, window_share: as in `SnapKV`.
        intrinsic: the part of the importance that does not depend on the window: "value_norm", "key_norm" (short keys
            first) or "none".
    """

    intrinsic: Literal["value_norm", "key_norm", "none"] = "value_norm"

    name: ClassVar[str] = "mixkv"

    def __post_init__(self) -> None:
        super().__post_init__()
        choice(self.name, "intrinsic", self.intrinsic, ("value_norm", "key_norm", "none"))

    def prefill(self, view: PrefillView) -> Decision:
        """Keep the window and the tokens with the best mixed scores."""
        size = self.layer_tokens(view)
        window, score = self.window_and_scores(view, size)
        candidates = (view.candidates & ~window).expand_as(score)
        similarity, redundancy = key_similarity(view.keys, view.candidates)
        diversity = scaled_like(-similarity, score, candidates)
        importance = score
        if self.intrinsic == "value_norm":
            importance = score + scaled_like(norms(view.values), score, candidates)
        elif self.intrinsic == "key_norm":
            importance = score + scaled_like(-norms(view.keys), score, candidates)
        mix = redundancy[..., None].to(score.dtype)
        score = (mix * diversity + (1 - mix) * importance).masked_fill(~candidates, -torch.inf)
        return Decision(keep=keep_top(score, size[:, None] - window.sum(-1)) | window)


def key_similarity(keys: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
    """Measure the similarity of a head's keys by their directions u, one head at a time.

    Args:
        keys: [B, H, C, D].
        real: bool [B, C], or [B, 1 or H, C], the columns that count.

    Returns:
        u . mean(u) for every column, [B, H, C], and the redundancy [B, H]: the mean of u_i . u_j over pairs i != j,
        which is (n |mean|^2 - 1) / (n - 1), clipped to [0, 1]; 0 for a single token. Both float32 or float64.
    """
    wide = torch.promote_types(keys.dtype, torch.float32)
    counted = (real[:, None] if real.dim() == 2 else real).expand(keys.shape[:3])
    similarity = torch.empty(keys.shape[:3], dtype=wide, device=keys.device)
    redundancy = torch.empty(keys.shape[:2], dtype=wide, device=keys.device)
    for head in range(keys.shape[1]):
        units = torch.nn.functional.normalize(keys[:, head].to(wide), dim=-1)
        own, count = counted[:, head], counted[:, head].sum(-1).clamp_min(1)
        units = units.masked_fill(~own[..., None], 0)
        mean = units.sum(1) / count[:, None]
        similarity[:, head] = (units @ mean[..., None])[..., 0]
        pairs = (count * mean.square().sum(-1) - 1) / (count - 1).clamp_min(1)
        redundancy[:, head] = pairs.clamp(0, 1)
    return similarity, redundancy


def norms(vectors: Tensor) -> Tensor:
    """Return the norms of vectors [..., D], in float32 or float64."""
    return torch.linalg.vector_norm(vectors, dim=-1, dtype=torch.promote_types(vectors.dtype, torch.float32))


def scaled_like(values: Tensor, score: Tensor, candidates: Tensor) -> Tensor:
    """Scale values to [0, 1] among the candidates of a head, then to the mean of the candidates' scores.

    All three are [..., C]; candidates is bool. Heads whose candidates all have the same value get 0. The result is
    defined at candidates only.
    """
    low = values.masked_fill(~candidates, torch.inf).amin(-1, keepdim=True)
    high = values.masked_fill(~candidates, -torch.inf).amax(-1, keepdim=True)
    spread = torch.where(high > low, high - low, torch.inf)
    share = torch.where(candidates, (values - low) / spread, 0)
    share = share.nan_to_num(0)  # inf - inf if a head has no candidates
    total = share.sum(-1, keepdim=True)
    wanted = score.masked_fill(~candidates, 0).sum(-1, keepdim=True)
    return share * torch.where(total > 0, wanted / total, 0)

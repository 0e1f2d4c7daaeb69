"""MixKV: importance mixed with the diversity of keys, head by head (Liu et al., arXiv 2510.20707)."""

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
    """Per KV head: important tokens, and in heads with much the same keys everywhere, tokens with unusual keys.

    Importance is SnapKV's score plus the norm of the token's value; diversity is minus the cosine between the token's
    key and the mean direction of the head's keys. Norm and diversity are brought to [0, 1] and then to the mean of
    SnapKV's score. A head's redundancy r, the mean cosine between two of its keys, mixes them:
    r * diversity + (1 - r) * importance.

    Not stated in the paper; we clip r at 0, take keys after RoPE as they are
    stored, and count all real tokens for r and the mean direction, and the tokens before the window for the rest.
    `intrinsic` is the part of the importance that does not depend on the window: "value_norm", "key_norm" (short keys
    first) or "none".
    """

    intrinsic: Literal["value_norm", "key_norm", "none"] = "value_norm"

    name: ClassVar[str] = "mixkv"

    def __post_init__(self) -> None:
        super().__post_init__()
        choice(self.name, "intrinsic", self.intrinsic, ("value_norm", "key_norm", "none"))

    def prefill(self, view: PrefillView) -> Decision:
        size = self.layer_tokens(view)
        window, score = self.window_and_scores(view, size)
        score = self.smooth(score.masked_fill(window[:, None], 0.0))
        candidates = (view.prompt.real & ~window)[:, None].expand_as(score)
        similarity, redundancy = key_similarity(view.keys, view.prompt.real)
        diversity = scaled_like(-similarity, score, candidates)
        importance = score
        if self.intrinsic == "value_norm":
            importance = score + scaled_like(norms(view.values), score, candidates)
        elif self.intrinsic == "key_norm":
            importance = score + scaled_like(-norms(view.keys), score, candidates)
        mix = redundancy[..., None].to(score.dtype)
        score = (mix * diversity + (1 - mix) * importance).masked_fill(~candidates, -torch.inf)
        return Decision(keep=keep_top(score, (size - window.sum(-1))[:, None]) | window[:, None])


def key_similarity(keys: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
    """How alike the keys of a head are, by their directions u: keys [B, H, C, D], real bool [B, C].

    Returns u . mean of u for every column, [B, H, C], and [B, H] the mean of u_i . u_j over pairs i != j, which is
    (n |mean|^2 - 1) / (n - 1), clipped to [0, 1]; 0 for a single token. At least float32, one head at a time.
    """
    wide = torch.promote_types(keys.dtype, torch.float32)
    count = real.sum(-1).clamp_min(1)
    similarity = torch.empty(keys.shape[:3], dtype=wide, device=keys.device)
    redundancy = torch.empty(keys.shape[:2], dtype=wide, device=keys.device)
    for head in range(keys.shape[1]):
        units = torch.nn.functional.normalize(keys[:, head].to(wide), dim=-1)
        units = units.masked_fill(~real[..., None], 0)
        mean = units.sum(1) / count[:, None]
        similarity[:, head] = (units @ mean[..., None])[..., 0]
        pairs = (count * mean.square().sum(-1) - 1) / (count - 1).clamp_min(1)
        redundancy[:, head] = pairs.clamp(0, 1)
    return similarity, redundancy


def norms(vectors: Tensor) -> Tensor:
    """Lengths of [..., D], at least float32."""
    return torch.linalg.vector_norm(vectors, dim=-1, dtype=torch.promote_types(vectors.dtype, torch.float32))


def scaled_like(values: Tensor, score: Tensor, candidates: Tensor) -> Tensor:
    """Values brought to [0, 1] among the candidates of a head, then to the mean of the candidates' scores.

    All three [..., C]; candidates bool. Heads whose candidates have all the same value get 0. What stands at other
    columns means nothing.
    """
    low = values.masked_fill(~candidates, torch.inf).amin(-1, keepdim=True)
    high = values.masked_fill(~candidates, -torch.inf).amax(-1, keepdim=True)
    spread = torch.where(high > low, high - low, torch.inf)
    share = torch.where(candidates, (values - low) / spread, 0)
    share = share.nan_to_num(0)  # (inf - inf) where a head has no candidates
    total = share.sum(-1, keepdim=True)
    wanted = score.masked_fill(~candidates, 0).sum(-1, keepdim=True)
    return share * torch.where(total > 0, wanted / total, 0)

"""InfiniPot-V: fixed memory for streams of frames, without a question (Kim et al., arXiv 2506.15745)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from foveakv.core.selection import keep_top
from foveakv.methods.checks import flag, share, whole_number
from foveakv.methods.frame_options import FrameMethod, check_frame_tokens, frames
from foveakv.methods.views import Decision, PrefillView

POOLS = ((2, 7), (2, 5), (1, 3), (0, 1))
"""Dimensions and width of the pool in each quarter of the layers, as in the authors' code."""


@dataclass
class InfiniPotV(FrameMethod):
    """Keep visual tokens that changed over time, then those with the largest values, `budget` tokens per KV head.

    `temporal_share` of the visual tokens (TaR, temporal redundancy): the newest `recent_share` of the frames, then
    tokens whose keys are least similar, by cosine, to those at the same place in these frames. The rest (VaN, value
    norm): the largest norms of values, averaged over neighbouring tokens of the frame, over more of them in earlier
    layers. No attention is read, and no question is needed.

    From the authors' code (aiha-lab/InfiniPot-V, `kvcache_utils.py`): the shares, the mean over the newest frames, the
    widths of the pools. Not stated there; we count text in the budget (`text_share`), pool along the tokens of a frame
    where its rows are not known, and compare a token with its own place in the frame also after evictions.

    Args:
        budget: tokens to keep per KV head, text included: a share of the context, tokens per head, or bytes.
        text_share: the largest share of the budget for tokens that are not visual, while visual tokens need the rest.
            Those before the first frame come first, then the newest.
        frame_tokens: tokens of one frame of a video whose frames follow each other without text (Qwen2-VL,
            Qwen2.5-VL). None: every image, and every run of video tokens, is one frame.
        row_tokens: tokens of one row of a frame, for pooling. None: the square root of the frame's tokens, if that is
            a whole number.
        temporal_share: share of the kept visual tokens that differ from the newest frames, these frames included.
        recent_share: share of the frames that are the newest ones, at least one frame.
        pool: average the norms of values over neighbouring tokens.
    """

    frame_tokens: int | None = None
    row_tokens: int | None = None
    temporal_share: float = 0.5
    recent_share: float = 0.25
    pool: bool = True

    name: ClassVar[str] = "infinipotv"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_frame_tokens(self.name, self.frame_tokens)
        if self.row_tokens is not None:
            whole_number(self.name, "row_tokens", self.row_tokens, 1, "tokens of a row of a frame; or None")
        share(self.name, "temporal_share", self.temporal_share, meaning="of the kept visual tokens")
        share(self.name, "recent_share", self.recent_share, meaning="of the frames")
        flag(self.name, "pool", self.pool)

    def prefill(self, view: PrefillView) -> Decision:
        """Keep text, tokens that differ from the newest frames, and tokens with large values."""
        text, room = self.text_and_room(view)
        heads = view.keys.shape[1]
        visual = (view.candidates & view.prompt.visual[:, None]).expand(-1, heads, -1)
        frame, place = frames(view, self.frame_tokens)
        norms = view.values.float().norm(dim=-1)
        if self.pool:
            norms = self._pooled(norms, visual, frame, place, view)
        changed = self._changed(view.keys, visual, frame, place)
        by_time = room - ((1 - self.temporal_share) * room.double()).round().long()
        first = keep_top(changed.masked_fill(~visual, -torch.inf), by_time.expand(-1, heads))
        norms = norms.masked_fill(~visual, -torch.inf).masked_fill(first, torch.inf)
        return Decision(keep=keep_top(norms, room.expand(-1, heads)) | text)

    def _changed(self, keys: Tensor, visual: Tensor, frame: Tensor, place: Tensor) -> Tensor:
        """Score tokens by how little their keys resemble the newest frames: float32 [B, H, C], newest frames highest.

        keys: [B, H, C, D]. visual: bool [B, H, C], the tokens to compare. frame, place: int64 [B, C].
        """
        batch, heads, columns, dim = keys.shape
        recent = visual & self._recent(visual, frame, place)[:, None]
        places = int(place.max()) + 1 if columns else 0
        if places <= 0:
            return torch.zeros_like(visual, dtype=torch.float32)
        unit = F.normalize(keys.float(), dim=-1, eps=1e-9)
        target = place.clamp_min(0)[:, None].expand(batch, heads, columns)
        total = unit.new_zeros(batch, heads, places, dim)
        wide = target[..., None].expand(-1, -1, -1, dim)
        total.scatter_add_(2, wide, unit * recent[..., None])
        count = unit.new_zeros(batch, heads, places).scatter_add_(2, target, recent.float())
        mean = total / count.clamp_min(1)[..., None]  # 0 where the newest frames have no such place
        likeness = (unit * mean.gather(2, wide)).sum(-1)
        newest = 2 + torch.arange(columns, device=keys.device) / columns  # above every -cosine, newer ones first
        return torch.where(recent, newest.expand_as(likeness), -likeness)

    def _recent(self, visual: Tensor, frame: Tensor, place: Tensor) -> Tensor:
        """Mark the columns of the newest frames: bool [B, C].

        What is stored counts in whole frames, of as many tokens as the newest one has, as in the authors' code.
        """
        last = frame.amax(-1, keepdim=True)
        size = torch.where(frame == last, place, -1).amax(-1) + 1  # [B]
        stored = visual.sum(-1).amax(-1)
        number = (self.recent_share * (stored // size.clamp_min(1))).long().clamp_min(1)
        return (frame >= 0) & (frame > last - number[:, None])

    def _pooled(self, norms: Tensor, visual: Tensor, frame: Tensor, place: Tensor, view: PrefillView) -> Tensor:
        """Average norms [B, H, C] over the stored neighbours of each token in its frame; see `POOLS`."""
        layers = view.request.geometry.layers
        dimensions, width = POOLS[min(view.compressed_idx * len(POOLS) // layers, len(POOLS) - 1)]
        places = int(place.max()) + 1
        if width == 1 or places <= 0:
            return norms
        row = self.row_tokens or math.isqrt(places)
        if dimensions == 1 or (self.row_tokens is None and row * row != places):
            row = places  # along the tokens of a frame
        rows = -(-places // row)
        batch, heads, columns = norms.shape
        seen = torch.zeros(batch, int(frame.max()) + 2, dtype=torch.bool, device=frame.device)
        seen.scatter_(1, frame + 1, True)
        number = (seen[:, 1:].cumsum(-1) - 1).gather(1, frame.clamp_min(0))  # numbers without gaps
        count = int(number.max()) + 1
        cell = (number * rows * row + place.clamp_min(0)).masked_fill(place < 0, count * rows * row)
        cell = cell[:, None].expand(batch, heads, columns)
        grid = norms.new_zeros(2, batch, heads, count * rows * row + 1)  # sums and counts
        grid[0].scatter_(2, cell, norms * visual)
        grid[1].scatter_(2, cell, visual.to(norms.dtype))
        cells = grid[..., :-1].reshape(-1, 1, rows, row)
        size = (min(width, 2 * rows - 1), min(width, 2 * row - 1))
        size = (size[0] - 1 + size[0] % 2, size[1] - 1 + size[1] % 2)
        pooled = F.avg_pool2d(cells, size, stride=1, padding=(size[0] // 2, size[1] // 2))
        sums, stored = pooled.view(2, batch, heads, -1)
        means = F.pad(sums / stored.clamp_min(1e-9), (0, 1))
        return means.gather(2, cell)

"""InfiniPot-V: fixed memory for streams of frames, without a question (Kim et al., arXiv 2506.15745)."""

from __future__ import annotations

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
        frame, place, size = frames(view, self.frame_tokens)
        norms = view.values.float().norm(dim=-1)
        if self.pool:
            norms = self._pooled(norms, visual, frame, place, size, view)
        recent = visual & self._recent(visual, frame, size)[:, None]
        changed = self._changed(view.keys, recent, place)
        by_time = room - ((1 - self.temporal_share) * room.double()).round().long()
        first = keep_top(changed.masked_fill(~visual, -torch.inf), by_time.expand(-1, heads))
        norms = norms.masked_fill(~visual, -torch.inf).masked_fill(first, torch.inf)
        return Decision(keep=keep_top(norms, room.expand(-1, heads)) | text)

    def _changed(self, keys: Tensor, recent: Tensor, place: Tensor) -> Tensor:
        """Score tokens by how little their keys resemble the newest frames: float32 [B, H, C], newest frames highest.

        keys: [B, H, C, D]. recent: bool [B, H, C], the stored tokens of the newest frames. place: int64 [B, C].
        """
        batch, heads, columns, dim = keys.shape
        places = int(place.max()) + 1 if columns else 0
        if places <= 0:
            return torch.zeros_like(recent, dtype=torch.float32)
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

    def _recent(self, visual: Tensor, frame: Tensor, size: Tensor) -> Tensor:
        """Mark the columns of the newest frames: bool [B, C].

        What is stored counts in whole frames, of as many tokens as the newest one has, as in the authors' code.
        """
        last = frame.amax(-1, keepdim=True)
        newest = torch.where(frame == last, size, 0).amax(-1)  # [B], tokens of the newest frame
        stored = visual.sum(-1).amax(-1)
        number = (self.recent_share * (stored // newest.clamp_min(1))).long().clamp_min(1)
        return (frame >= 0) & (frame > last - number[:, None])

    def _pooled(
        self, norms: Tensor, visual: Tensor, frame: Tensor, place: Tensor, size: Tensor, view: PrefillView
    ) -> Tensor:
        """Average norms [B, H, C] over the stored neighbours of each token in its frame; see `POOLS`."""
        dimensions, width = POOLS[min(view.compressed_idx * len(POOLS) // view.request.geometry.layers, len(POOLS) - 1)]
        if width == 1 or not bool((place >= 0).any()):
            return norms
        row = self._row(size, dimensions)
        batch, heads, columns = norms.shape
        seen = torch.zeros(batch, int(frame.max()) + 2, dtype=torch.bool, device=frame.device)
        seen.scatter_(1, frame + 1, True)
        number = (seen[:, 1:].cumsum(-1) - 1).gather(1, frame.clamp_min(0))  # numbers of frames without gaps
        high, wide, count = int((place // row).max()) + 1, int(row.max()), int(number.max()) + 1
        cell = (number * high + place // row) * wide + place % row
        cell = cell.masked_fill(place < 0, count * high * wide)[:, None].expand(batch, heads, columns)
        grid = norms.new_zeros(2, batch, heads, count * high * wide + 1)  # sums and numbers of stored tokens
        grid[0].scatter_(2, cell, norms * visual)
        grid[1].scatter_(2, cell, visual.to(norms.dtype))
        cells = grid[..., :-1].reshape(-1, 1, high, wide)
        window = [min(width, 2 * side - 1) for side in (high, wide)]  # odd, and no larger than reaches all of a frame
        pooled = F.avg_pool2d(cells, window, stride=1, padding=[side // 2 for side in window])
        sums, stored = pooled.view(2, batch, heads, -1)
        return F.pad(sums / stored.clamp_min(1e-9), (0, 1)).gather(2, cell)

    def _row(self, size: Tensor, dimensions: int) -> Tensor:
        """Tokens per row of each column's frame: int64 [B, C]; the whole frame is one row to pool along its tokens."""
        if dimensions == 1:
            return size.clamp_min(1)
        if self.row_tokens is not None:
            return torch.full_like(size, self.row_tokens)
        side = size.double().sqrt().round().long()
        return torch.where(side * side == size, side, size).clamp_min(1)

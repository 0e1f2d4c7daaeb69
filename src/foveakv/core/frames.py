"""Frames of a prompt: which one a visual token belongs to, and which tokens of a budget go to text."""

from __future__ import annotations

import torch
from torch import Tensor

from foveakv.core.prompt import VIDEO, PromptMap
from foveakv.core.selection import keep_top


def frames_of(prompt: PromptMap, frame_tokens: int | None = None) -> tuple[Tensor, Tensor]:
    """Number the frames of each sequence and the places within them.

    An image is a frame, and so is a run of video tokens, unless `frame_tokens` says how many tokens each frame of a
    video has.

    Args:
        prompt: map of the whole context, [B, C].
        frame_tokens: tokens of one frame of a video whose frames follow each other without text.

    Returns:
        (frame, place), int64 [B, C] each: the number of the frame from 0 in the order of columns, and the index of the
        token within its frame; -1 at columns that are not visual.
    """
    place = prompt.place.long()
    if frame_tokens is not None:
        video = prompt.kinds == VIDEO
        place = torch.where(video, place % frame_tokens, place)
    frame = (place == 0).cumsum(-1) - 1
    return frame.masked_fill(place < 0, -1), place


def frame_sizes(frame: Tensor, place: Tensor) -> Tensor:
    """Return for every visual column the number of tokens of its frame, 0 elsewhere: int64 [B, C].

    frame, place: of all columns, from `frames_of`.
    """
    count = int(frame.max()) + 2 if frame.numel() else 1
    sizes = frame.new_zeros(frame.shape[0], count)
    sizes.scatter_reduce_(1, frame + 1, place + 1, "amax")
    return sizes.gather(1, frame + 1)


def keep_text(
    candidates: Tensor, prompt: PromptMap, context: PromptMap, positions: Tensor, sizes: Tensor, share: float
) -> Tensor:
    """Mark the tokens that are not visual and stay: those before the first frame, then the newest.

    They get at most `share` of each head's tokens, rounded down, and what visual tokens do not need.

    Args:
        candidates: bool [B, 1 or H, C], what may be kept.
        prompt: map of the columns, [B, C].
        context: map of the whole context.
        positions: int64 [B, C], positions of the columns.
        sizes: int64 [B, 1 or H], tokens that a head keeps.
        share: share of them that may be text, 0 to 1.

    Returns:
        bool [B, 1 or H, C].
    """
    visual = candidates & prompt.visual[:, None]
    others = candidates & ~prompt.visual[:, None]
    room = torch.maximum((sizes.double() * share + 1e-9).long(), sizes - visual.sum(-1))
    first = torch.where(context.visual.any(-1), context.first_visual, 0)
    leading = (positions < first[:, None])[:, None]
    columns = others.shape[-1]
    number = torch.arange(columns, device=others.device)
    score = torch.where(leading, 2 * columns - number, number).float()  # leading text from its first token on
    return keep_top(score.masked_fill(~others, -torch.inf), room)

"""Frames at regular distances over the whole context: a baseline for streams."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from foveakv.core.selection import keep_top
from foveakv.methods.frame_options import FrameMethod, check_frame_tokens, frames
from foveakv.methods.views import Decision, Granularity, PrefillView


@dataclass
class UniformFrames(FrameMethod):
    """Keep every n-th frame and some text, `budget` tokens in total, the same in every layer and head.

    n is a power of two that grows with the context: frames whose number has the largest power of two as a factor stay
    longest, ties go to newer frames. So what is kept of a stream is what would be kept of all of it at once. Nothing is
    scored, so no question is needed. The last frame that fits only in part keeps its first tokens.

    Args:
        budget: tokens to keep per KV head, text included: a share of the context, tokens per head, or bytes.
        text_share: the largest share of the budget for tokens that are not visual, while visual tokens need the rest.
            Those before the first frame come first, then the newest.
        frame_tokens: tokens of one frame of a video whose frames follow each other without text (Qwen2-VL,
            Qwen2.5-VL). None: every image, and every run of video tokens, is one frame.
    """

    frame_tokens: int | None = None

    name: ClassVar[str] = "uniform_frames"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_frame_tokens(self.name, self.frame_tokens)

    @property
    def granularity(self) -> Granularity:
        """All layers and heads store the same tokens."""
        return "token"

    def prefill(self, view: PrefillView) -> Decision:
        """Keep text and the tokens of the frames at the largest distances."""
        text, room = self.text_and_room(view)
        frame, _, _ = frames(view, self.frame_tokens)
        visual = view.candidates & view.prompt.visual[:, None]
        number = frame.clamp_min(0)
        step = torch.where(number == 0, 2**31, number & -number)  # the largest power of two that divides it
        score = step.double() * 2**31 + number.double()  # below 2**63, and its steps differ in the leading bits
        return Decision(keep=keep_top(score[:, None].masked_fill(~visual, -torch.inf), room) | text)

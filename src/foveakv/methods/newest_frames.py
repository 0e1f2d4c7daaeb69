"""The newest frames, a baseline for streams; SimpleStream (arXiv 2604.02317) shows the last frames only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from foveakv.core.selection import keep_top
from foveakv.methods.frame_options import FrameMethod
from foveakv.methods.views import Decision, Granularity, PrefillView


@dataclass
class NewestFrames(FrameMethod):
    """Keep the newest visual tokens and some text, `budget` tokens in total, the same in every layer and head.

    Nothing is scored, so no question is needed. The oldest frame that fits only in part keeps its newest tokens.

    Args:
        budget: tokens to keep per KV head, text included: a share of the context, tokens per head, or bytes.
        text_share: the largest share of the budget for tokens that are not visual, while visual tokens need the rest.
            Those before the first frame come first, then the newest.
    """

    name: ClassVar[str] = "newest_frames"

    @property
    def granularity(self) -> Granularity:
        """All layers and heads store the same tokens."""
        return "token"

    def prefill(self, view: PrefillView) -> Decision:
        """Keep text and the newest visual tokens."""
        text, room = self.text_and_room(view)
        visual = view.candidates & view.prompt.visual[:, None]
        score = view.positions.double()[:, None].masked_fill(~visual, -torch.inf)
        return Decision(keep=keep_top(score, room) | text)

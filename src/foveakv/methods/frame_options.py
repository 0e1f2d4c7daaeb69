"""What the methods that choose among frames share: how much of the budget is text, and which frame a token is of."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from foveakv.core.budget import parse_budget
from foveakv.core.frames import frame_sizes, frames_of, keep_text
from foveakv.methods.base import Method
from foveakv.methods.checks import share, whole_number
from foveakv.methods.views import PrefillView


@dataclass
class FrameMethod(Method):
    """Base class of methods that keep some text and, in what it leaves of the budget, visual tokens by frame.

    Args:
        budget: tokens to keep per KV head, text included: a share of the context, tokens per head, or bytes.
        text_share: the largest share of the budget for tokens that are not visual, while visual tokens need the rest.
            Those before the first frame come first, then the newest.
    """

    budget: float | int | str = 0.2
    text_share: float = 0.5

    def __post_init__(self) -> None:
        parse_budget(self.budget)
        share(self.name, "text_share", self.text_share, meaning="of the budget, for text")

    def text_and_room(self, view: PrefillView) -> tuple[Tensor, Tensor]:
        """Return the text to keep, bool [B, 1 or H, C], and the visual tokens that fit beside it, int64 [B, 1 or H]."""
        sizes = view.budget_tokens(self.budget)[:, None]
        text = keep_text(view.candidates, view.prompt, view.request.prompt, view.positions, sizes, self.text_share)
        return text, sizes - text.sum(-1)


def check_frame_tokens(name: str, frame_tokens: int | None) -> None:
    """Raise `MethodError` unless the option `frame_tokens` of the method `name` is valid."""
    if frame_tokens is not None:
        whole_number(name, "frame_tokens", frame_tokens, 1, "tokens of a frame of a video; or None")


def frames(view: PrefillView, frame_tokens: int | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return the frame of every column, counted over the whole context, its place in it, and the frame's size.

    int64 [B, C] each; -1, -1 and 0 at columns that are not visual. frame_tokens: see `foveakv.core.frames.frames_of`.
    """
    frame, place = frames_of(view.request.prompt, frame_tokens)
    found = [each.gather(1, view.positions) for each in (frame, place, frame_sizes(frame, place))]
    other = ~view.prompt.visual
    return found[0].masked_fill(other, -1), found[1].masked_fill(other, -1), found[2].masked_fill(other, 0)

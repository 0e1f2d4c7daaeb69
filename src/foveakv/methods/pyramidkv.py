"""PyramidKV: SnapKV with budgets that shrink from the first layer to the last (Cai et al., arXiv 2406.02069)."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from foveakv.methods.checks import whole_number
from foveakv.methods.snapkv import SnapKV
from foveakv.methods.views import PrefillView


@dataclass
class PyramidKV(SnapKV):
    """SnapKV's choice, with budgets that fall in a straight line from the first layer to the last.

    With b tokens beyond the window in the mean, the last layer keeps b / beta of them and the first 2 b - b / beta.
    The paper gives both ends and the line between them (its section on budget allocation). Not stated; we clip the
    first layer at the prompt and flatten the line, so that other layers get what it cannot use, and round so that the
    layers together hold exactly `budget` tokens per layer. `window` and `kernel` are SnapKV's (the paper's window is
    8).
    """

    beta: int = 20

    name: ClassVar[str] = "pyramidkv"

    def __post_init__(self) -> None:
        super().__post_init__()
        whole_number(self.name, "beta", self.beta, 1, "the last layer keeps this part of the mean budget")

    def layer_tokens(self, view: PrefillView) -> Tensor:
        size = view.budget_tokens(self.budget)
        window = self.window_tokens(size)
        pairs = zip((size - window).tolist(), (view.request.prompt.lengths - window).tolist(), strict=True)
        layers = view.request.geometry.layers
        return window + torch.tensor(
            [pyramid(mean, most, layers, self.beta)[view.compressed_idx] for mean, most in pairs], device=size.device
        )


def pyramid(mean: int, most: int, layers: int, beta: int) -> list[int]:
    """Tokens of every layer, first to last: in a straight line, at most `most`, and layers * mean in all.

    mean: tokens in the mean, at most `most`. The last layer gets mean // beta, the first 2 * mean - mean // beta; where
    that is more than `most` it gets `most`, and the last one what makes the mean right again.
    """
    if layers == 1:
        return [mean]
    first = min(2 * mean - mean // beta, most)
    fall = 2 * (first - mean)  # from the first layer to the last
    # in integers: rounding the running sum and not each layer keeps the total
    steps = 2 * (layers - 1)
    sums = [(steps * first * n - fall * n * (n - 1)) // steps for n in range(layers + 1)]
    return [after - before for before, after in itertools.pairwise(sums)]

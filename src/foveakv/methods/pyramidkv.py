"""PyramidKV: SnapKV with budgets that decrease from the first layer to the last (Cai et al., arXiv 2406.02069)."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from foveakv.methods.checks import whole_number
from foveakv.methods.snapkv import SnapKV
from foveakv.methods.views import PrefillView


@dataclass
class PyramidKV(SnapKV):
    """Select tokens as SnapKV does, with budgets that decrease linearly from the first layer to the last.

    If the mean budget is b tokens in addition to the window, the last layer keeps b / beta of them and the first
    2 b - b / beta. The paper states both ends and the linear decrease (section on budget allocation).

    Not stated in the paper; we clip the first layer at the length of the prompt and flatten the slope, so that the
    other layers get the surplus, and round such that the mean over layers is `budget` tokens.

    Args:
        budget, window, kernel, window_share: as in `SnapKV` (the paper's window is 8, which is in its preset).
        beta: the last layer keeps b / beta tokens in addition to the window.
    """

    beta: int = 20

    name: ClassVar[str] = "pyramidkv"
    presets: ClassVar[dict[str, dict[str, Any]]] = {"paper": {"window": 8, "kernel": 5, "window_share": 1.0}}

    def __post_init__(self) -> None:
        super().__post_init__()
        whole_number(self.name, "beta", self.beta, 1, "the last layer keeps 1 / beta of the mean budget")

    def layer_tokens(self, view: PrefillView) -> Tensor:
        """Return the tokens that every head of this layer keeps: int64 [B]."""
        size = view.budget_tokens(self.budget)
        window = self.window_tokens(view.request, size)
        geometry = view.request.geometry
        most = torch.as_tensor(geometry.contexts, device=size.device) - window
        pairs, layers = zip((size - window).tolist(), most.tolist(), strict=True), geometry.layers
        return window + torch.tensor(
            [pyramid(mean, most, layers, self.beta)[view.compressed_idx] for mean, most in pairs], device=size.device
        )


def pyramid(mean: int, most: int, layers: int, beta: int) -> list[int]:
    """Return the tokens of every layer, first to last: linearly decreasing, at most `most`, layers * mean in total.

    The last layer gets mean // beta tokens and the first 2 * mean - mean // beta. If that exceeds `most`, the first
    layer gets `most`, and the last layer as many as preserve the mean.

    Args:
        mean: mean tokens per layer, at most `most`.
        most: the most tokens that a layer can keep.
        layers: number of layers.
        beta: as in `PyramidKV`.
    """
    if layers == 1:
        return [mean]
    first = min(2 * mean - mean // beta, most)
    fall = 2 * (first - mean)  # from the first layer to the last
    # Integer arithmetic: rounding the running sum instead of each layer preserves the total.
    steps = 2 * (layers - 1)
    sums = [(steps * first * n - fall * n * (n - 1)) // steps for n in range(layers + 1)]
    return [after - before for before, after in itertools.pairwise(sums)]

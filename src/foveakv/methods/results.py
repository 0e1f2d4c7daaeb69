"""Results that methods report about a request, in types that are independent of the method."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from foveakv.methods.views import State


@dataclass
class HeadMaps(State):
    """Maps with one entry per KV head, CPU tensors [B, L, H].

    scores: float32 or float64, the values that heads were classified by. static: bool, False for heads that read
    chunks. budgets: int64, slots. slots: int64, slots on the device after the prompt, chosen chunks included.
    """

    scores: Tensor
    static: Tensor
    budgets: Tensor
    slots: Tensor


@dataclass(frozen=True)
class Results:
    """What a method did to one request.

    figures: plain values for reports (numbers, strings, lists and dicts of them). heads: classes and budgets per head,
    if the method classifies heads. layer_tokens: int64 [B, L], tokens per head of every layer, if the method allocates
    budgets per layer. notes: caveats for readers of the figures, one sentence each.
    """

    figures: dict[str, Any] = field(default_factory=dict)
    heads: HeadMaps | None = None
    layer_tokens: Tensor | None = None
    notes: tuple[str, ...] = ()

"""What methods report about a request, in types that need no knowledge of the method."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from foveakv.methods.views import State


@dataclass
class HeadMaps(State):
    """One entry per KV head, CPU tensors [B, L, H].

    scores: the value that heads were classified by. static: bool, False for heads that read chunks. budgets: int64
    slots. slots: int64 slots on the device after the prompt, chosen chunks included.
    """

    scores: Tensor
    static: Tensor
    budgets: Tensor
    slots: Tensor


@dataclass(frozen=True)
class Results:
    """What a method did to one request.

    figures: plain values for reports (numbers, texts, lists and dicts of them). heads: classes and budgets per head,
    from methods that have them. layer_tokens: int64 [B, L], tokens per head of every layer, from methods that share a
    budget among layers. notes: what a reader must know before quoting figures, one sentence each.
    """

    figures: dict[str, Any] = field(default_factory=dict)
    heads: HeadMaps | None = None
    layer_tokens: Tensor | None = None
    notes: tuple[str, ...] = ()

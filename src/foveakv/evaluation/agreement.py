"""Agreement of a method with the full cache, token by token over the full cache's replies."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class Agreement:
    """Per token: whether both choose the same one, and the divergence in nats.

    `match`, `equal`, `kl` and `scored` are defined in `Result`. Without tokens, match and equal are 1 and kl is None.
    """

    same: list[bool] = field(default_factory=list)
    divergences: list[float] = field(default_factory=list)

    @classmethod
    def perfect(cls, scored: int) -> Agreement:
        """The agreement of the full cache with itself."""
        return cls([True] * scored, [0.0] * scored)

    @property
    def scored(self) -> int:
        """Number of tokens."""
        return len(self.same)

    @property
    def differs(self) -> bool:
        """Whether the method chooses a different token somewhere."""
        return not all(self.same)

    @property
    def match(self) -> float:
        """Share of leading tokens that are equal."""
        if not self.same:
            return 1.0
        return (self.same.index(False) if False in self.same else len(self.same)) / len(self.same)

    @property
    def equal(self) -> float:
        """Share of tokens that are equal."""
        return sum(self.same) / len(self.same) if self.same else 1.0

    @property
    def kl(self) -> float | None:
        """Mean Kullback-Leibler divergence from the full cache, in nats."""
        return sum(self.divergences) / len(self.divergences) if self.divergences else None


def add(agreements: list[Agreement], full: Tensor, methods: list[Tensor]) -> None:
    """Adds one token per method, from the full cache's and the methods' logits [vocabulary], float32."""
    p = full.log_softmax(-1)
    logits = torch.stack(methods)
    terms = p.exp() * (p - logits.log_softmax(-1))
    divergence = terms.masked_fill(p == -torch.inf, 0).sum(-1).clamp_min(0)  # 0 * log 0 is 0
    same = logits.argmax(-1) == full.argmax()
    for agreement, value, equal in zip(agreements, divergence.tolist(), same.tolist(), strict=True):
        agreement.divergences.append(value)
        agreement.same.append(equal)

"""Choose the next token."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from foveakv.serving.errors import internal


@dataclass(frozen=True)
class Sampling:
    """temperature: 0 takes the most likely token. top_p: sample from the most likely tokens that have this probability
    together. seed: None draws one."""

    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None


class Sampler:
    """Draws the tokens of one choice. The same seed, choice and logits give the same tokens."""

    def __init__(self, sampling: Sampling, choice: int) -> None:
        self.sampling = sampling
        self._random = torch.Generator()
        if sampling.seed is None:
            self._random.seed()
        else:
            self._random.manual_seed((sampling.seed + choice * 0x9E3779B97F4A7C15) % 2**63)

    def draw(self, logits: Tensor) -> int:
        """Draw a token from logits [vocabulary], float32 on the CPU."""
        if not bool(torch.isfinite(logits).any()) or bool(torch.isnan(logits).any()):
            raise internal("the model's logits contain NaN or infinity")
        if self.sampling.temperature == 0:
            return int(logits.argmax())
        # Subtracting the maximum first keeps tiny temperatures finite.
        odds = ((logits.double() - logits.max()) / self.sampling.temperature).softmax(-1)
        if self.sampling.top_p < 1:
            ordered, index = odds.sort(descending=True, stable=True)
            before = ordered.cumsum(-1) - ordered  # the first token that reaches top_p is kept
            odds = torch.zeros_like(odds).scatter(0, index, ordered.where(before < self.sampling.top_p, 0.0))
        return int(torch.multinomial(odds, 1, generator=self._random))


def top(logits: Tensor, token: int, count: int) -> tuple[float, list[tuple[int, float]]]:
    """Log-probability of a token before temperature and top_p, and the `count` most likely tokens with theirs."""
    logprobs = logits.log_softmax(-1)
    values, index = logprobs.topk(min(count, len(logprobs)))
    return float(logprobs[token]), list(zip(index.tolist(), values.tolist(), strict=True))

"""Decode steps of many answers at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from foveakv.engines.transformers import compat, joined
from foveakv.engines.transformers.cache import CompressedCache
from foveakv.engines.transformers.joined import JoinedCache
from foveakv.errors import MembersFailedError


class Steps:
    """Runs decode steps of one model.

    suppressed: tokens that are never generated.
    """

    def __init__(self, model: Any, suppressed: Sequence[int] = ()) -> None:
        self.model = model
        self._name = compat.cache_argument(model)
        self._suppressed = torch.tensor(list(suppressed), dtype=torch.long)

    @staticmethod
    def joinable(caches: Sequence[CompressedCache]) -> bool:
        """Whether these caches share one forward pass; otherwise each has its own."""
        return all(joined.problem(cache) is None for cache in caches)

    def run(self, caches: Sequence[CompressedCache], tokens: Sequence[int]) -> list[Tensor | Exception]:
        """Add one token to each cache, of one sequence; return what follows: logits [vocabulary], or why it failed.

        When the pass itself fails, all of its caches have failed.
        """
        if not caches:
            return []
        if not self.joinable(caches):
            return [self._alone(cache, token) for cache, token in zip(caches, tokens, strict=True)]
        ids = torch.tensor([[token] for token in tokens], device=self.model.device)
        errors: dict[int, Exception] = {}
        try:
            logits = self.model(input_ids=ids, **{self._name: JoinedCache(caches)}, use_cache=True).logits
        except MembersFailedError as error:
            logits, errors = error.output.logits, error.errors
            error.__traceback__ = error.__cause__ = None
        except Exception as error:
            return [error] * len(caches)
        rows = self.scores(logits[:, -1])
        return [errors.get(number, row) for number, row in enumerate(rows)]

    def scores(self, logits: Tensor) -> Tensor:
        """Logits [..., vocabulary] as samplers take them: float32 on the CPU."""
        scores = logits.float().cpu()
        return scores.index_fill(-1, self._suppressed, float("-inf")) if len(self._suppressed) else scores

    def _alone(self, cache: CompressedCache, token: int) -> Tensor | Exception:
        ids = torch.tensor([[token]], device=self.model.device)
        try:
            return self.scores(self.model(input_ids=ids, **{self._name: cache}, use_cache=True).logits[0, -1])
        except Exception as error:
            return error

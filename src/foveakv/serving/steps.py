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
    def joinable(cache: CompressedCache) -> bool:
        """Whether this cache shares a forward pass with others; otherwise it has its own."""
        return joined.problem(cache) is None

    def run(self, caches: Sequence[CompressedCache], tokens: Sequence[int]) -> list[Tensor | Exception]:
        """Add one token to each cache, of one sequence; return what follows: logits [vocabulary], or why it failed.

        Caches that can be joined share one pass; when it fails as a whole, all of them have failed.
        """
        together = [number for number, cache in enumerate(caches) if self.joinable(cache)]
        shared = self._together([caches[number] for number in together], [tokens[number] for number in together])
        found = dict(zip(together, shared, strict=True))
        return [
            found[number] if number in found else self._alone(cache, token)
            for number, (cache, token) in enumerate(zip(caches, tokens, strict=True))
        ]

    def scores(self, logits: Tensor) -> Tensor:
        """Logits [..., vocabulary] as samplers take them: float32 on the CPU."""
        scores = logits.float().cpu()
        return scores.index_fill(-1, self._suppressed, float("-inf")) if len(self._suppressed) else scores

    def _together(self, caches: Sequence[CompressedCache], tokens: Sequence[int]) -> list[Tensor | Exception]:
        """One pass for all of these caches, which can be joined."""
        if not caches:
            return []
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

    def _alone(self, cache: CompressedCache, token: int) -> Tensor | Exception:
        ids = torch.tensor([[token]], device=self.model.device)
        try:
            return self.scores(self.model(input_ids=ids, **{self._name: cache}, use_cache=True).logits[0, -1])
        except Exception as error:
            return error

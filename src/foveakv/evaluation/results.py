"""The result of one method on one item, and its form in JSON."""

from __future__ import annotations

import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from foveakv.errors import FoveaKVError, InputError, NoVisualTokensError
from foveakv.evaluation import schema
from foveakv.evaluation.schema import Between, Count, Real, Share

FULL = "full"
"""The method that everything is compared with: the full cache."""

Seconds = Annotated[float, Between(1e-12, 1e9)]


def describe_error(error: Exception) -> str:
    """Type and message; with the place in the code, unless it is one of FoveaKV's errors."""
    text = f"{type(error).__name__}: {error}"
    frames = traceback.extract_tb(error.__traceback__)
    if isinstance(error, FoveaKVError) or not frames:
        return text
    return f"{text} ({Path(frames[-1].filename).name}, line {frames[-1].lineno})"


def does_not_apply(error: str | None) -> bool:
    """Whether an error only says that the method drops visual tokens only and the item has no image."""
    return error is not None and error.startswith(f"{NoVisualTokensError.__name__}:")


@dataclass(frozen=True)
class TurnResult:
    """One turn. text: the question. reply, expected: the model's answer and the right one. score: share of its facts
    that are right. facts, tokens: number of facts that count, and of tokens in the reply."""

    text: str
    reply: str
    expected: str
    score: Share
    facts: Count
    tokens: Count


@dataclass(frozen=True)
class Result:
    """One item with one method. If `error` is set, everything after `settings` is None or empty.

    task, item, seed: which item. method, budget: which candidate (`budget` None: the method takes none, or its settings
    have it); label: "hybridkv 0.1"; settings: all its options.
    score: mean over turns of the share of facts that are right, 0 to 1.
    match: share of the full cache's reply tokens, counted from the first, that the method reproduces (all turns, given
    the full cache's earlier replies). equal: share of all those tokens that the method reproduces, each predicted from
    the full cache's tokens before it. kl: mean Kullback-Leibler divergence, in nats, of the method's next-token
    distribution from the full cache's, over `scored` tokens: those of the full cache's replies that were computed with
    the compressed cache (the first token of the first reply is excluded, because its prefill attends to everything; it
    is included for methods that prune tokens during the prefill).
    log_likelihood: mean log-probability of the tokens of the method's own reply under the full cache, in nats; None for
    tasks with short replies.
    context: tokens of the first prompt. stored_bytes: storage on the compute device at the end of the first reply;
    full_bytes: a plain cache's for the same tokens; host_bytes: in the backing store; peak_bytes: the maximum until
    then. evicted, retrieved, hits: slots until then.
    token_seconds: median of the first decode steps over the full cache's reply, with this method alone, synchronised
    with an accelerator (None: not measured on this item); full_token_seconds: the full cache's, measured alternately.
    prefill_seconds: the method's own work after the prompt (including the model's if it reads the prompt itself),
    without synchronisation.
    details: what the method reports about itself (HybridKV: `static_heads`, layers x heads of 0 and 1).
    """

    task: str
    item: Count
    seed: Count
    method: str
    budget: float | int | str | None
    label: str
    settings: dict[str, Any]

    score: Share | None = None
    turns: tuple[TurnResult, ...] = ()
    match: Share | None = None
    equal: Share | None = None
    kl: Annotated[float, Between(0, 1e30)] | None = None
    scored: Count = 0
    log_likelihood: Real | None = None
    context: Count = 0
    stored_bytes: Count | None = None
    full_bytes: Count | None = None
    host_bytes: Count | None = None
    peak_bytes: Count | None = None
    evicted: Count = 0
    retrieved: Count = 0
    hits: Count = 0
    token_seconds: Seconds | None = None
    prefill_seconds: Real | None = None
    full_token_seconds: Seconds | None = None
    details: dict[str, Any] | None = None
    error: str | None = None

    @property
    def key(self) -> tuple[str, int, int, str]:
        """Identifies this result within a run."""
        return self.task, self.item, self.seed, self.label

    @property
    def static_heads(self) -> list[list[float]] | None:
        """[layers][heads], 1 where the head is static; None if the method does not classify heads."""
        return (self.details or {}).get("static_heads")

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Any) -> Result:
        """The inverse of `to_dict`. InputError: a field is missing, unknown or has a wrong value."""
        found = schema.read(cls, data)
        schema.check_budget(found.budget)
        if found.error is None and found.score is None:
            raise InputError("score is missing, and there is no error")
        if found.static_heads is not None:
            schema.check_matrix(found.static_heads, "details.static_heads")
        return found

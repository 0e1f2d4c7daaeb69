"""What one method did on one item, and how it is written down."""

from __future__ import annotations

import traceback
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from foveakv.errors import FoveaKVError, NoVisualTokensError

FULL = "full"
"""The method that everything is compared with: the full cache."""


def describe_error(error: Exception) -> str:
    """Kind and text; with the place in the code, unless the project raised it on purpose."""
    text = f"{type(error).__name__}: {error}"
    frames = traceback.extract_tb(error.__traceback__)
    if isinstance(error, FoveaKVError) or not frames:
        return text
    return f"{text} ({Path(frames[-1].filename).name}, line {frames[-1].lineno})"


def does_not_apply(error: str | None) -> bool:
    """Whether an error only says that a method which drops visual tokens alone met an item without a picture."""
    return error is not None and error.startswith(f"{NoVisualTokensError.__name__}:")


@dataclass(frozen=True)
class TurnResult:
    """text: the question. reply, expected: what came, what is right. score: share of the facts that are right."""

    text: str
    reply: str
    expected: str
    score: float
    facts: int
    tokens: int


@dataclass(frozen=True)
class Result:
    """One item with one method. Everything but the first block is None or empty where `error` is set.

    task, item, seed: which item. method, budget: which candidate (`budget` None: the method takes none, or its
    settings hold it); label: "hybridkv 0.1"; settings: all its options.
    score: mean over turns of the share of facts that are right, 0 to 1.
    match: share of the full cache's reply tokens, counted from the first, that the method gives as well (all turns,
    the full cache's earlier replies given). equal: share of all those tokens that the method gives as well, each behind
    the full cache's tokens before it. kl: mean Kullback-Leibler divergence, in nats, of the method's next-token
    distribution from the full cache's, over `scored` tokens: those of the full cache's replies that were computed with
    the compressed cache (the first token of the first reply is not, its prefill sees everything; of a method that takes
    tokens out of the prefill it counts).
    log_likelihood: mean log-probability that the full cache gives to the tokens of the method's own reply, in nats;
    None for tasks with short replies.
    context: tokens of the first prompt. stored_bytes: storage on the compute device at the end of the first reply;
    full_bytes: a plain cache's for the same tokens; host_bytes: in the backing store; peak_bytes: the most until then.
    evicted, retrieved, hits: slots until then. token_seconds: median of the first
    decode steps over the full cache's reply, the method alone, an accelerator waited for (None: not measured on this
    item); prefill_seconds: the method's own work after the prompt (with the model's where it reads the prompt for
    itself), on the host's clock without waiting.
    full_token_seconds: the full cache's token_seconds, measured in turns with this one.
    details: what the method says about itself (HybridKV: `static_heads`, layers x heads of 0 and 1).
    """

    task: str
    item: int
    seed: int
    method: str
    budget: float | int | str | None
    label: str
    settings: dict[str, Any]

    score: float | None = None
    turns: tuple[TurnResult, ...] = ()
    match: float | None = None
    equal: float | None = None
    kl: float | None = None
    scored: int = 0
    log_likelihood: float | None = None
    context: int = 0
    stored_bytes: int | None = None
    full_bytes: int | None = None
    host_bytes: int | None = None
    peak_bytes: int | None = None
    evicted: int = 0
    retrieved: int = 0
    hits: int = 0
    token_seconds: float | None = None
    prefill_seconds: float | None = None
    full_token_seconds: float | None = None
    details: dict[str, Any] | None = None
    error: str | None = None

    @property
    def key(self) -> tuple[str, int, int, str]:
        """What makes this result one of a kind within a run."""
        return self.task, self.item, self.seed, self.label

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Result:
        """Back from `to_dict`; fields that this version does not know are left out."""
        values = _known(cls, data)
        values["turns"] = tuple(TurnResult(**_known(TurnResult, turn)) for turn in data.get("turns", ()))
        return cls(**values)


def _known(kind: type, data: dict[str, Any]) -> dict[str, Any]:
    names = {f.name for f in fields(kind)}
    return {name: value for name, value in data.items() if name in names}

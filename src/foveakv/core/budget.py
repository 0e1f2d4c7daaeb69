"""Budgets as users write them (0.1, 1024, "10%", "512MiB"), and their conversion to tokens and slots.

A slot is one (layer, KV head, token) triple. Conversions never exceed the budget.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from numbers import Integral, Real
from typing import Literal

import torch
from torch import Tensor

from foveakv.errors import BudgetError

_UNITS = {
    "": 1,
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "t": 10**12,
    "ki": 2**10,
    "mi": 2**20,
    "gi": 2**30,
    "ti": 2**40,
}
_HOW = 'write a share (0.1 or "10%"), tokens per head (1024) or bytes for the whole cache ("512MiB", "1.5GB")'


@dataclass(frozen=True)
class Geometry:
    """The sizes of one cache.

    batch: number of sequences. contexts: prompt tokens of each sequence, without padding. layers: number of layers that
    store a cache. kv_heads: KV heads per layer. head_dim, value_dim: dimensions of keys and of values. itemsize: bytes
    of one stored number. shares_of: tokens of each sequence that a share is of, where these are not `contexts`.

    Raises:
        BudgetError: `contexts` does not have one length per sequence.
    """

    batch: int
    contexts: Sequence[int] | Tensor
    layers: int
    kv_heads: int
    head_dim: int
    value_dim: int
    itemsize: int
    shares_of: Sequence[int] | Tensor | None = None

    def __post_init__(self) -> None:
        for name in ("contexts", "shares_of"):
            given = getattr(self, name)
            given = self.contexts if given is None else given
            lengths = tuple(int(c) for c in (given.tolist() if isinstance(given, Tensor) else given))
            if len(lengths) != self.batch or min(lengths, default=0) < 0:
                raise BudgetError(f"Geometry: {self.batch} sequences need as many prompt lengths >= 0, got {lengths}")
            object.__setattr__(self, name, lengths)

    @property
    def heads(self) -> int:
        """KV heads over all layers, which is the number of slots per token."""
        return self.layers * self.kv_heads

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot: a key and a value."""
        return (self.head_dim + self.value_dim) * self.itemsize

    @property
    def token_bytes(self) -> int:
        """Bytes of one token of one sequence, over all layers and heads."""
        return self.slot_bytes * self.heads


@dataclass(frozen=True)
class Budget:
    """How much of the prompt's cache to keep; created by `parse_budget`.

    kind: "ratio" (share of each prompt), "tokens" (per head and sequence) or "bytes" (whole cache: all sequences,
    layers and heads, keys and values). value: the share or number, without rounding. text: as the user wrote it.
    """

    kind: Literal["ratio", "tokens", "bytes"]
    value: Fraction
    text: str

    def __str__(self) -> str:
        if self.kind == "ratio":
            return f"{float(self.value * 100):.6g}% of the prompt"
        if self.kind == "tokens":
            return f"{self.value} tokens per head"
        return f"{self.text} for the whole cache"

    @property
    def full(self) -> bool:
        """Whether the budget keeps every token of a prompt of any length."""
        return self.kind == "ratio" and self.value == 1

    def tokens(self, geometry: Geometry) -> Tensor:
        """Return the tokens per head for each sequence: int64 [B], rounded down, at least 1 and at most the prompt.

        A budget in bytes keeps the same share of every prompt.

        Raises:
            BudgetError: the bytes do not hold one token per head.
        """
        contexts = [int(c) for c in geometry.contexts]
        if self.kind == "bytes":
            return torch.tensor(_tokens_from_bytes(int(self.value), contexts, geometry, self.text), dtype=torch.int64)
        if self.kind == "tokens":
            counts = [int(self.value)] * len(contexts)
        else:
            counts = [math.floor(self.value * int(c)) for c in geometry.shares_of or ()]
        return torch.tensor([_clip(n, c) for n, c in zip(counts, contexts, strict=True)], dtype=torch.int64)

    def steady(self, geometry: Geometry) -> Tensor:
        """Return the steady tokens per head of a method that evicts while decoding: int64 [B], at least 1.

        Unlike `tokens`, the result may exceed the prompt: a number of tokens is not clipped, and bytes that the prompts
        do not need are shared equally. A ratio is a share of the prompt.
        """
        if self.kind == "tokens":
            return torch.full((geometry.batch,), min(int(self.value), 2**62), dtype=torch.int64)
        tokens = self.tokens(geometry)
        if self.kind == "bytes":
            contexts = torch.as_tensor(geometry.contexts, dtype=torch.int64)
            spare = int(self.value) // geometry.token_bytes - int(contexts.sum())
            if spare > 0:
                tokens = contexts + spare // geometry.batch
        return tokens.clamp_min(1)

    def slots(self, geometry: Geometry) -> Tensor:
        """Return the slots over all layers and heads for each sequence: int64 [B].

        A ratio is applied to all slots and rounded once, so that a method that allocates slots across heads loses less
        to rounding than with `tokens`.

        Raises:
            BudgetError: the bytes do not hold one token per head.
        """
        if self.kind != "ratio":
            return self.tokens(geometry) * geometry.heads
        slots = [
            min(max(math.floor(self.value * int(share) * geometry.heads), geometry.heads), int(c) * geometry.heads)
            for c, share in zip(geometry.contexts, geometry.shares_of or (), strict=True)
        ]
        return torch.tensor(slots, dtype=torch.int64)


def parse_budget(x: float | int | str | Budget) -> Budget:
    """Parse a budget: 0.1 or "10%" (share of the prompt), 1024 (tokens per head), "512MiB" or "1.5GB" (whole cache).

    An integer always means tokens: 1 is one token per head, 1.0 is the whole prompt.

    Raises:
        BudgetError: the value cannot be parsed, is not positive, or is a share above 100%.
    """
    if isinstance(x, Budget):
        return x
    if isinstance(x, bool) or not isinstance(x, Real | str):
        raise BudgetError(f"budget {x!r} is a {type(x).__name__}; {_HOW}")
    if isinstance(x, str):
        return _parse_text(x)
    if isinstance(x, Integral):
        return _tokens(int(x), str(x))
    return _ratio(_exact(x), str(x))


def digest_bytes(kind: Literal["model", "bf16", "int8", "int4"], dim: int, itemsize: int) -> tuple[int, int]:
    """Return the bytes of one chunk's mean as a digest, and the fixed bytes per head (the scales of int8 and int4).

    kind: how digests are stored. dim: dimension of keys. itemsize: bytes of one number in the model's dtype.
    """
    if kind == "int8":
        return dim, 4 * dim
    if kind == "int4":
        return (dim + 1) // 2, 4 * dim
    return dim * (2 if kind == "bf16" else itemsize), 0


def _exact(x: Real) -> Fraction:
    value = float(x)
    if not math.isfinite(value):
        raise BudgetError(f"budget {x} is not a finite number; {_HOW}")
    return Fraction(repr(value))  # 0.29 is 29/100, not its binary approximation


def _ratio(value: Fraction, text: str) -> Budget:
    if value <= 0:
        raise BudgetError(f"budget {text} keeps nothing; {_HOW}")
    if value > 1:
        raise BudgetError(f"{text} is over 100%; write 1.0 for everything or an integer for tokens per head")
    return Budget("ratio", value, text)


def _tokens(value: int, text: str) -> Budget:
    if value <= 0:
        raise BudgetError(f"budget {text} keeps nothing; {_HOW}")
    if value > 2**62:
        raise BudgetError(f"budget {text} is larger than any context; {_HOW}")
    return Budget("tokens", Fraction(value), text)


def _parse_text(text: str) -> Budget:
    text = text.strip()
    match = re.fullmatch(r"([+-]?(?:\d+(?:_\d+)*\.?\d*|\.\d+)(?:[eE][+-]?\d{1,3})?)\s*(%|[A-Za-z]*)", text)
    if match is None or len(text) > 100:  # longer numbers take Python minutes, or raise
        raise BudgetError(f"budget {text[:100]!r} cannot be read; {_HOW}")
    digits, unit = match[1], match[2]
    number = Fraction(digits)
    if unit == "%":
        return _ratio(number / 100, text)
    if not unit:
        return _tokens(int(digits), text) if re.fullmatch(r"[+-]?\d+(?:_\d+)*", digits) else _ratio(number, text)
    prefix = unit.lower().removesuffix("b")
    if not unit.lower().endswith("b") or prefix not in _UNITS:
        raise BudgetError(f"budget {text!r}: unknown unit {unit!r}; {_HOW}")
    size = math.floor(number * _UNITS[prefix])
    if size <= 0:
        raise BudgetError(f"budget {text} keeps nothing; {_HOW}")
    return Budget("bytes", Fraction(size), text)


def _clip(tokens: int, context: int) -> int:
    return min(max(tokens, 1), context)


def _tokens_from_bytes(size: int, contexts: list[int], geometry: Geometry, text: str) -> list[int]:
    if not any(contexts):
        return [0] * len(contexts)
    room = size // geometry.token_bytes  # tokens over all sequences
    occupied = sum(c > 0 for c in contexts)
    if room < occupied:
        raise BudgetError(
            f"{text} cannot hold one token per head: {occupied} sequences x {geometry.heads} heads need at least "
            f"{occupied * geometry.token_bytes} bytes"
        )
    counts = [_clip(room * c // sum(contexts), c) for c in contexts]
    while sum(counts) > room:  # short sequences were raised to one token; reduce the longest
        counts[counts.index(max(counts))] -= 1
    return counts

"""Budgets: what users write (0.1, 1024, "10%", "512MiB"), and how many slots each head gets of it.

A slot is one (layer, KV head, token) pair. Nothing here ever hands out more slots than the budget holds.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from numbers import Integral, Real
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from .errors import BudgetError

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

    contexts: prompt tokens of each sequence, padding not counted. layers: layers that store a cache.
    itemsize: bytes of one stored number.
    """

    batch: int
    contexts: Sequence[int] | Tensor
    layers: int
    kv_heads: int
    head_dim: int
    value_dim: int
    itemsize: int

    def __post_init__(self) -> None:
        contexts = self.contexts.tolist() if isinstance(self.contexts, Tensor) else self.contexts
        contexts = tuple(int(c) for c in contexts)
        if len(contexts) != self.batch or min(contexts, default=0) < 0:
            raise BudgetError(f"Geometry: {self.batch} sequences need as many prompt lengths >= 0, got {contexts}")
        object.__setattr__(self, "contexts", contexts)

    @property
    def heads(self) -> int:
        """KV heads of all layers together: slots that one token takes."""
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
    """How much of the prompt's cache may stay. Made by `parse_budget`.

    kind: "ratio" (share of each prompt), "tokens" (per head and sequence) or "bytes" (whole cache: all sequences,
    layers and heads, keys and values). value: exact. text: as the user wrote it.
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
        """True when the budget keeps every prompt token whatever its length."""
        return self.kind == "ratio" and self.value == 1

    def tokens(self, geometry: Geometry) -> Tensor:
        """Tokens per head for each sequence: LongTensor [B], rounded down, at least 1 and at most the prompt.

        A budget in bytes gives every sequence the same share of its prompt. It raises BudgetError when one token per
        head does not fit.
        """
        contexts = [int(c) for c in geometry.contexts]
        if self.kind == "bytes":
            return torch.tensor(_tokens_from_bytes(int(self.value), contexts, geometry, self.text), dtype=torch.int64)
        if self.kind == "tokens":
            counts = [int(self.value)] * len(contexts)
        else:
            counts = [math.floor(self.value * c) for c in contexts]
        return torch.tensor([_clip(n, c) for n, c in zip(counts, contexts, strict=True)], dtype=torch.int64)

    def steady(self, geometry: Geometry) -> Tensor:
        """Tokens per head that a method which evicts while decoding settles at: LongTensor [B], at least 1.

        Unlike `tokens` it may exceed the prompt: tokens are taken as they are, and bytes that the prompts leave over
        are shared equally. A ratio is one of the prompt.
        """
        if self.kind == "tokens":
            return torch.full((geometry.batch,), int(self.value), dtype=torch.int64)
        tokens = self.tokens(geometry)
        if self.kind == "bytes":
            contexts = torch.as_tensor(geometry.contexts, dtype=torch.int64)
            spare = int(self.value) // geometry.token_bytes - int(contexts.sum())
            if spare > 0:
                tokens = contexts + spare // geometry.batch
        return tokens.clamp_min(1)

    def slots(self, geometry: Geometry) -> Tensor:
        """Slots over all layers and heads for each sequence: LongTensor [B].

        A share is taken of all slots and rounded once, so a method that allots slots across heads loses less to
        rounding than with `tokens`.
        """
        if self.kind != "ratio":
            return self.tokens(geometry) * geometry.heads
        slots = [
            min(max(math.floor(self.value * int(c) * geometry.heads), geometry.heads), int(c) * geometry.heads)
            for c in geometry.contexts
        ]
        return torch.tensor(slots, dtype=torch.int64)


def parse_budget(x: float | int | str | Budget) -> Budget:
    """Read a budget: 0.1 or "10%" (share of the prompt), 1024 (tokens per head), "512MiB" or "1.5GB" (whole cache).

    An integer always means tokens: 1 is one token per head, 1.0 is everything.
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


def _exact(x: Real) -> Fraction:
    value = float(x)
    if not math.isfinite(value):
        raise BudgetError(f"budget {x} is not a number that can be kept to; {_HOW}")
    return Fraction(repr(value))  # 0.29 is 29/100, not the binary number just below it


def _ratio(value: Fraction, text: str) -> Budget:
    if value <= 0:
        raise BudgetError(f"budget {text} keeps nothing; {_HOW}")
    if value > 1:
        raise BudgetError(f"{text} is over 100%; write 1.0 for everything or an integer for tokens per head")
    return Budget("ratio", value, text)


def _tokens(value: int, text: str) -> Budget:
    if value <= 0:
        raise BudgetError(f"budget {text} keeps nothing; {_HOW}")
    return Budget("tokens", Fraction(value), text)


def _parse_text(text: str) -> Budget:
    text = text.strip()
    match = re.fullmatch(r"([+-]?(?:\d+(?:_\d+)*\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*(%|[A-Za-z]*)", text)
    if match is None:
        raise BudgetError(f"budget {text!r} cannot be read; {_HOW}")
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
    while sum(counts) > room:  # short sequences were raised to one token: the longest gives way
        counts[counts.index(max(counts))] -= 1
    return counts


class Allocation(NamedTuple):
    """What `allocate_heads` hands out.

    budgets: LongTensor [L, H], slots per head. nominal: what Eq. 4 and 5 name before rounding and trimming.
    true: the sum of `budgets`, never above the total. static / dynamic: its two parts. minimum: what every head was
    assured.
    """

    budgets: Tensor
    nominal: int
    true: int
    static: int
    dynamic: int
    minimum: int


def allocate_heads(
    scores: Tensor,
    static: Tensor,
    context: int,
    total: int,
    rho: float = 0.75,
    a: float = 0.1,
    *,
    min_budget: int = 32,
    chunk: int = 8,
    rounding: Literal["down", "nearest"] = "down",
    head_level: bool = True,
    type_level: bool = True,
    spend_rest: bool = False,
) -> Allocation:
    """Top-down budget allocation of HybridKV (arXiv 2604.05887) for one sequence.

    scores: [L, H] float, S of Eq. 3. static: [L, H] bool. context: prompt tokens C. total: slots B_total.

    Type level, Eq. 4: the dynamic heads together get B_dyn = ceil(rho * B_total / N * N_dyn), the static ones the rest.
    Head level, Eq. 5: a static head gets ceil(a * B_stat / N_stat + (1 - a) * B_stat * S / sum of S); dynamic heads
    share B_dyn equally, rounded to a power of two.

    Not stated in the paper; we
    - round the power of two down (`rounding="nearest"` may exceed B_dyn, at the static heads' cost);
    - keep it at least one chunk (`chunk` slots) where the total allows it;
    - trim the ceilings so that the sum is never above `total`: the smallest fractions lose first;
    - cap a head at C and hand the rest on; with one type of head only, that type gets everything;
    - assure every head of min(min_budget, C) slots. Where the total cannot pay that for all heads, of an equal share
      total // N instead (a dynamic head then of the power of two below it);
    - leave what the rounding to powers of two frees unspent (`spend_rest=True` hands it to the static heads);
    - take a = 0.1 (the paper does not publish it).
    `type_level=False` gives both types the same mean budget; `head_level=False` shares equally among static heads.
    """
    _check_allocation(scores, static, context, total, rho, a, min_budget, chunk, rounding)
    is_static = static.flatten().cpu()
    heads = is_static.numel()
    n_static = int(is_static.sum())
    n_dynamic = heads - n_static
    total = min(total, heads * context)
    wanted = min(min_budget, context)
    affordable = heads * wanted <= total
    minimum = wanted if affordable else total // heads

    # Eq. 4, between what the types must get at least and can hold at most
    share = Fraction(repr(float(rho))) if type_level else Fraction(1)
    b_dynamic = math.ceil(share * total * n_dynamic / heads)
    b_dynamic = max(b_dynamic, n_dynamic * minimum, total - n_static * context)
    b_dynamic = min(b_dynamic, total - n_static * minimum, n_dynamic * context)

    each = _dynamic_budget(
        b_dynamic, n_dynamic, n_static, total, context, minimum, wanted if affordable else 1, chunk, rounding
    )
    spent = each * n_dynamic
    b_static = total - max(spent, 0 if spend_rest else b_dynamic)
    b_static = min(b_static, n_static * context)

    # Eq. 5
    values = scores.flatten().cpu().double()[is_static]
    weights = _static_weights(values, a if head_level else 1.0)
    nominal = b_dynamic + int((weights * (total - b_dynamic) - 1e-9).ceil().sum())
    budgets = torch.full((heads,), each, dtype=torch.int64)
    budgets[is_static] = _share_out(weights, values, b_static, minimum, context)
    return Allocation(
        budgets.view(static.shape), nominal, int(budgets.sum()), int(budgets[is_static].sum()), spent, minimum
    )


def _check_allocation(
    scores: Tensor,
    static: Tensor,
    context: int,
    total: int,
    rho: float,
    a: float,
    min_budget: int,
    chunk: int,
    rounding: str,
) -> None:
    if scores.shape != static.shape or not scores.numel():
        raise BudgetError(f"scores {tuple(scores.shape)} and static {tuple(static.shape)} must both be [layers, heads]")
    if not bool(torch.isfinite(scores).all()) or bool((scores < 0).any()):
        raise BudgetError("head scores must be finite and not negative")
    if context < 1:
        raise BudgetError("an empty prompt has nothing to allot")
    if total < scores.numel():
        raise BudgetError(f"{total} slots for {scores.numel()} heads: every head needs at least one; raise the budget")
    if not 0 <= rho < math.inf:
        raise BudgetError(f"rho must be 0 or more, got {rho}")
    if not 0 <= a <= 1:
        raise BudgetError(f"a must lie between 0 and 1, got {a}")
    if min_budget < 1 or chunk < 1:
        raise BudgetError(f"min_budget ({min_budget}) and chunk ({chunk}) must be at least 1")
    if rounding not in ("down", "nearest"):
        raise BudgetError(f'rounding must be "down" or "nearest", got {rounding!r}')


def _dynamic_budget(
    b_dynamic: int,
    n_dynamic: int,
    n_static: int,
    total: int,
    context: int,
    minimum: int,
    required: int,
    chunk: int,
    rounding: str,
) -> int:
    """Slots of each dynamic head: a power of two, or C where that is the cap, or the minimum where no power fits."""
    if not n_dynamic:
        return 0

    def fits(n: int) -> bool:
        return n * n_dynamic + n_static * minimum <= total

    mean = Fraction(b_dynamic, n_dynamic)
    if mean >= context:
        return context
    low = 1 << (math.floor(mean).bit_length() - 1)
    each = low
    if rounding == "nearest" and 2 * low - mean <= mean - low and fits(min(2 * low, context)):
        each = min(2 * low, context)
    if each < chunk and fits(min(_power_at_least(chunk), context)):
        each = min(_power_at_least(chunk), context)
    if each < required:
        up = min(_power_at_least(required), context)
        each = up if fits(up) else required
    return each


def _power_at_least(n: int) -> int:
    return 1 << (n - 1).bit_length()


def _static_weights(scores: Tensor, a: float) -> Tensor:
    """Eq. 5 as shares of B_stat, [N_stat] float64; equal shares where all scores are 0."""
    if not scores.numel():
        return scores
    uniform = torch.full_like(scores, 1 / scores.numel())
    whole = scores.sum()
    return a * uniform + (1 - a) * (scores / whole if float(whole) > 0 else uniform)


def _share_out(weights: Tensor, scores: Tensor, slots: int, low: int, high: int) -> Tensor:
    """Integers [n] between low and high, in proportion to `weights` [n], that sum to exactly `slots`.

    Needs n * low <= slots <= n * high. A larger weight never gets less; between equal weights the larger score goes
    first, then the earlier head.
    """
    n = weights.numel()
    if not n:
        return torch.zeros(0, dtype=torch.int64)
    weights = weights.clamp_min(1e-12)
    exact = weights * slots
    if bool((exact < low).any() or (exact > high).any()):
        # clipped heads hand on what they leave: find the scale at which the clipped shares sum to `slots`
        small, large = 0.0, 2.0 * high / float(weights.min())
        for _ in range(200):
            middle = (small + large) / 2
            too_much = float((weights * middle).clamp(low, high).sum()) > slots
            small, large = (small, middle) if too_much else (middle, large)
        exact = (weights * small).clamp(low, high)
    budgets = (exact + 1e-9).floor().to(torch.int64).clamp(low, high)
    # ceilings for the largest fractions, as many as fit
    by_score = torch.argsort(scores, descending=True, stable=True)
    order = by_score[torch.argsort((exact - budgets)[by_score], descending=True, stable=True)].tolist()
    rest = slots - int(budgets.sum())
    while rest:
        step = 1 if rest > 0 else -1
        for i in order if rest > 0 else reversed(order):
            if rest and low <= int(budgets[i]) + step <= high:
                budgets[i] += step
                rest -= step
    return budgets

"""Slots for every head: HybridKV's top-down allocation, and the sharing out that other methods use too.

Nothing here ever hands out more slots than the total holds.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from foveakv.errors import BudgetError


def share_out(weights: Tensor, slots: int, low: int, high: int, scores: Tensor | None = None) -> Tensor:
    """Integers [n] between low and high, in proportion to `weights` [n] (a sum of 1), that sum to exactly `slots`.

    Needs n * low <= slots <= n * high. What a share would be above `high` goes to the others. A larger weight never
    gets less; between equal weights the larger of `scores` [n] goes first, then the earlier one.
    """
    scores = weights if scores is None else scores
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
    budgets[is_static] = share_out(weights, b_static, minimum, context, values)
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

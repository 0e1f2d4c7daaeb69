"""Allocation of slots to heads: HybridKV's top-down allocation, and proportional shares, which other methods use too.

The sum of an allocation never exceeds the total.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from foveakv.errors import BudgetError


def share_out(weights: Tensor, slots: int, low: int, high: int, scores: Tensor | None = None) -> Tensor:
    """Split `slots` into integers [n] between `low` and `high`, in proportion to `weights`; they sum to `slots`.

    Requires n * low <= slots <= n * high. Slots above `high` are redistributed to the others. A larger weight never
    gets fewer slots; for equal weights, the larger of `scores` is served first, then the earlier entry.

    Args:
        weights: [n], with a sum of 1.
        slots: total number of slots.
        low, high: bounds of each share.
        scores: [n], to order equal weights; None = `weights`.

    Returns:
        int64 [n].
    """
    scores = weights if scores is None else scores
    n = weights.numel()
    if not n:
        return torch.zeros(0, dtype=torch.int64)
    weights = weights.clamp_min(1e-12)
    shares = weights * slots
    if bool((shares < low).any() or (shares > high).any()):
        # Find the scale at which the clipped shares sum to `slots`.
        small, large = 0.0, 2.0 * high / float(weights.min())
        for _ in range(200):
            middle = (small + large) / 2
            too_much = float((weights * middle).clamp(low, high).sum()) > slots
            small, large = (small, middle) if too_much else (middle, large)
        shares = (weights * small).clamp(low, high)
    budgets = (shares + 1e-9).floor().to(torch.int64).clamp(low, high)
    # Round up the largest fractions, as many as fit.
    by_score = torch.argsort(scores, descending=True, stable=True)
    order = by_score[torch.argsort((shares - budgets)[by_score], descending=True, stable=True)].tolist()
    rest = slots - int(budgets.sum())
    if not low * len(order) <= slots <= high * len(order):
        raise BudgetError(f"{slots} slots cannot be shared among {len(order)} heads of {low} to {high} slots each")
    while rest:
        step = 1 if rest > 0 else -1
        for i in order if rest > 0 else reversed(order):
            if rest and low <= int(budgets[i]) + step <= high:
                budgets[i] += step
                rest -= step
    return budgets


class Allocation(NamedTuple):
    """Result of `allocate_heads`.

    budgets: int64 [L, H], slots per head. nominal: slots by Eq. 4 and 5 before rounding and trimming. true: the sum of
    `budgets`, never above the total. static, dynamic: its two parts. minimum: guaranteed slots per head.
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
    step: int = 1,
    rounding: Literal["chunks", "down", "nearest"] = "down",
    head_level: bool = True,
    type_level: bool = True,
    spend_rest: bool = False,
) -> Allocation:
    """Allocate the budget of one sequence to its heads, top-down as in HybridKV (arXiv 2604.05887).

    Type level, Eq. 4: dynamic heads get B_dyn = ceil(rho * B_total / N * N_dyn) slots in total, static heads the rest.
    Head level, Eq. 5: a static head gets ceil(a * B_stat / N_stat + (1 - a) * B_stat * S / sum of S); dynamic heads
    share B_dyn equally, rounded to a power of two.

    Not stated in the paper; we
    - round down to a power of two (`rounding="nearest"` may exceed B_dyn, which reduces the static budget; "chunks"
      rounds down to `chunk` and a multiple of `step` more);
    - allocate at least one chunk (`chunk` slots) to a dynamic head if the total allows it;
    - trim the ceilings so that the sum never exceeds `total`, the smallest fractions first;
    - cap a head at C and redistribute the surplus; if all heads have one type, that type gets everything;
    - guarantee every head min(min_budget, C) slots. If the total does not suffice for all heads, they are guaranteed an
      equal share total // N (dynamic heads the power of two below it);
    - leave slots freed by rounding unused (`spend_rest=True` gives them to static heads, and what these cannot hold, or
      without static heads, to the dynamic heads with the lowest scores, `step` slots each, if budgets are not rounded
      to powers of two);
    - use a = 0.1 (the paper does not publish it).

    Args:
        scores: float [L, H], S of Eq. 3.
        static: bool [L, H].
        context: prompt tokens C.
        total: slots B_total.
        rho, a: as in Eq. 4 and 5.
        min_budget, chunk, step, rounding, spend_rest: see above.
        head_level: False splits the static budget equally among static heads.
        type_level: False gives both types the same mean budget.

    Raises:
        BudgetError: an argument is invalid, or the total is below one slot per head.
    """
    _check_allocation(scores, static, context, total, rho, a, min_budget, chunk, step, rounding)
    is_static = static.flatten().cpu()
    heads = is_static.numel()
    n_static = int(is_static.sum())
    n_dynamic = heads - n_static
    total = min(total, heads * context)
    wanted = min(min_budget, context)
    affordable = heads * wanted <= total
    minimum = wanted if affordable else total // heads

    # Eq. 4, clipped to the least that each type must get and the most that it can hold
    share = Fraction(repr(float(rho))) if type_level else Fraction(1)
    b_dynamic = math.ceil(share * total * n_dynamic / heads)
    b_dynamic = max(b_dynamic, n_dynamic * minimum, total - n_static * context)
    b_dynamic = min(b_dynamic, total - n_static * minimum, n_dynamic * context)

    each = _dynamic_budget(
        b_dynamic, n_dynamic, n_static, total, context, minimum, wanted if affordable else 1, chunk, step, rounding
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
    if spend_rest and rounding == "chunks":
        _add_steps(budgets, scores.flatten().cpu().masked_fill(is_static, torch.inf), n_dynamic, total, step, context)
    static_part = int(budgets[is_static].sum())
    true = int(budgets.sum())
    return Allocation(budgets.view(static.shape), nominal, true, static_part, true - static_part, minimum)


def _add_steps(budgets: Tensor, scores: Tensor, count: int, total: int, step: int, context: int) -> None:
    """Give what is left of the total to the `count` lowest-scored heads, in steps, in place: budgets, scores [N]."""
    order = scores.argsort(stable=True)[:count]
    rest = total - int(budgets.sum())
    while rest > 0:
        able = order[budgets[order] + step <= context][: rest // step]
        if not len(able):
            return
        budgets[able] += step
        rest -= len(able) * step


def _check_allocation(
    scores: Tensor,
    static: Tensor,
    context: int,
    total: int,
    rho: float,
    a: float,
    min_budget: int,
    chunk: int,
    step: int,
    rounding: str,
) -> None:
    if scores.shape != static.shape or not scores.numel():
        raise BudgetError(f"scores {tuple(scores.shape)} and static {tuple(static.shape)} must both be [layers, heads]")
    if not bool(torch.isfinite(scores).all()) or bool((scores < 0).any()):
        raise BudgetError("head scores must be finite and not negative")
    if context < 1:
        raise BudgetError("the prompt is empty: there is nothing to allocate")
    if total < scores.numel():
        raise BudgetError(f"{total} slots for {scores.numel()} heads: every head needs at least one; raise the budget")
    if not 0 <= rho < math.inf:
        raise BudgetError(f"rho must be 0 or more, got {rho}")
    if not 0 <= a <= 1:
        raise BudgetError(f"a must be between 0 and 1, got {a}")
    if min_budget < 1 or chunk < 1 or step < 1:
        raise BudgetError(f"min_budget ({min_budget}), chunk ({chunk}) and step ({step}) must be at least 1")
    if rounding not in ("chunks", "down", "nearest"):
        raise BudgetError(f'rounding must be "chunks", "down" or "nearest", got {rounding!r}')


def _dynamic_budget(
    b_dynamic: int,
    n_dynamic: int,
    n_static: int,
    total: int,
    context: int,
    minimum: int,
    required: int,
    chunk: int,
    step: int,
    rounding: str,
) -> int:
    """Return the slots of each dynamic head: rounded, or C if capped, or the minimum if nothing rounded fits."""
    if not n_dynamic:
        return 0

    def fits(n: int) -> bool:
        return n * n_dynamic + n_static * minimum <= total

    mean = Fraction(b_dynamic, n_dynamic)
    if mean >= context:
        return context
    if rounding == "chunks":
        if mean < chunk:
            least = max(chunk, required)
            return min(least, context) if fits(min(least, context)) else max(math.floor(mean), required)
        return max(chunk + math.floor((mean - chunk) / step) * step, required)
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
    """Return Eq. 5 as shares of B_stat, float64 [N_stat]; equal shares if all scores are 0."""
    if not scores.numel():
        return scores
    uniform = torch.full_like(scores, 1 / scores.numel())
    whole = scores.sum()
    return a * uniform + (1 - a) * (scores / whole if float(whole) > 0 else uniform)

"""How HybridKV's head types and budgets change with theta and rho, from measured head scores; nothing is run.

Types: S >= theta (arXiv 2604.05887, Eq. 3). Budgets: Eq. 4 and 5, by `foveakv.core.allocation.allocate_heads`, without
a floor per head (min_budget=1) and without counting digests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from torch import Tensor

from foveakv.analysis.heads import PromptHeads
from foveakv.core.allocation import allocate_heads
from foveakv.core.budget import parse_budget
from foveakv.errors import MethodError
from foveakv.methods.hybridkv import HybridKV

THETAS = (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 0.98, 0.99)
RHO, CHUNK = 0.75, 8  # the paper's, where the method chooses for itself
RHOS = (0.0, 0.25, 0.5, 0.75, 1.0, 1.25)


@dataclass(frozen=True)
class Point:
    """Means over prompts for one theta and rho.

    theta: None = the types that the method itself gave. static_share: share of static heads. static_slots,
    dynamic_slots: share of the budget that each type gets; together below 1 if rounding leaves slots unused.
    static_each, dynamic_each: slots of one head as a share of the prompt; None without such heads.
    """

    theta: float | None
    rho: float
    static_share: float
    static_slots: float
    dynamic_slots: float
    static_each: float | None
    dynamic_each: float | None


def sweep(
    maps: PromptHeads, rules: HybridKV, *, thetas: Sequence[float] = THETAS, rhos: Sequence[float] = RHOS
) -> list[Point]:
    """Return a point for every theta at the method's rho, and one for every rho at the method's own types.

    A rho or chunk size that the method chooses for itself counts as the paper's, 0.75 or 8.

    Args:
        maps: scores and types of the heads.
        rules: settings of HybridKV; its budget, rho, alpha, chunk_size, rounding and levels are used.
        thetas, rhos: the values.

    Raises:
        MethodError: the budget is in bytes.
    """
    check_budget(rules)
    return [_point(maps, rules, theta, _given(rules.rho, RHO)) for theta in thetas] + [
        _point(maps, rules, None, rho) for rho in rhos
    ]


def check_budget(rules: HybridKV) -> None:
    """Raise `MethodError` for a budget in bytes."""
    if parse_budget(rules.budget).kind == "bytes":
        raise MethodError("the sweep over theta and rho takes a budget as a share of the prompt or in tokens per head")


def _given(value: Any, default: float) -> float:
    """Return a number that was set, or the default for an option such as "auto"."""
    return default if isinstance(value, str) else value


def _point(maps: PromptHeads, rules: HybridKV, theta: float | None, rho: float) -> Point:
    budget = parse_budget(rules.budget)
    chunk = int(_given(rules.chunk_size, CHUNK))
    parts: list[tuple[float, ...]] = []
    each: tuple[list[float], list[float]] = ([], [])
    for scores, own, context in zip(maps.scores, maps.static, maps.tokens, strict=True):
        static: Tensor = own if theta is None else scores >= theta
        tokens = min(budget.value * context if budget.kind == "ratio" else budget.value, context)
        total = max(int(tokens * scores.numel()), scores.numel())
        found = allocate_heads(
            scores, static, context, total, rho, rules.alpha, min_budget=1, chunk=chunk,
            rounding=rules.rounding, head_level=rules.head_level, type_level=rules.type_level,
        )  # fmt: skip
        parts.append((float(static.double().mean()), found.static / total, found.dynamic / total))
        for kind, (heads, slots) in enumerate(((static, found.static), (~static, found.dynamic))):
            if bool(heads.any()):
                each[kind].append(slots / int(heads.sum()) / context)
    means = [fmean(column) for column in zip(*parts, strict=True)]
    return Point(theta, rho, *means, *(fmean(values) if values else None for values in each))

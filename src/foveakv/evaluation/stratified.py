"""Stratified bootstrap: intervals of means over several tasks, each with its own items.

Every task has equal weight, regardless of its number of items. Items are resampled within each task (a stratified
percentile bootstrap), and all methods of a comparison use the same resamples, so that differences are paired. With
one task this is `bootstrap.paired`. Scores are shares, 0 to 1: if all resamples agree, because all items tie, the
bounds are exact (`bootstrap.tied`), with as many items as if every task had those of the smallest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence

import numpy as np

from foveakv.evaluation.bootstrap import Floats, Interval, agree, tied

LEVEL, DRAWS, SEED = 0.95, 2000, 0

Scores = Mapping[Hashable, float]
"""Item -> score, for one method on one task."""


def common(methods: Sequence[Scores]) -> Floats:
    """[n, methods]: the scores of the items that all methods have, in the order of the first method."""
    keys = [key for key in methods[0] if all(key in other for other in methods[1:])]
    return np.array([[scores[key] for scores in methods] for key in keys], dtype=np.float64).reshape(-1, len(methods))


def mean(tasks: Sequence[Floats], statistic: Callable[[Floats], Floats]) -> Interval:
    """Interval of a statistic of the methods' means over tasks.

    tasks: [n, methods] each, float64. statistic: means [..., methods] -> [...]. Without tasks, or if a task has no
    items, everything is NaN; with fewer than two items in a task the bounds are NaN.
    """
    count = sum(map(len, tasks))
    if not tasks or min(map(len, tasks)) == 0:
        return Interval(math.nan, math.nan, math.nan, count)
    means = np.mean([task.mean(0) for task in tasks], axis=0)
    estimate = float(statistic(means))
    if min(map(len, tasks)) < 2 or math.isnan(estimate):
        return Interval(estimate, math.nan, math.nan, count)
    found = statistic(_draws(tasks))
    found = found[~np.isnan(found)]
    if not len(found):
        return Interval(estimate, math.nan, math.nan, count)
    if agree(found):
        return Interval(estimate, *tied(statistic, means, _fewest(tasks), LEVEL), count)
    low, high = np.quantile(found, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Interval(estimate, float(low), float(high), count)


def first(means: Floats) -> Floats:
    """Column 0."""
    return means[..., 0]


def relative(means: Floats) -> Floats:
    """Column 0 / column 1 - 1; NaN where column 1 is 0."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(means[..., 1] == 0, np.nan, means[..., 0] / means[..., 1] - 1)


def difference(means: Floats) -> Floats:
    """Column 0 - column 1."""
    return means[..., 0] - means[..., 1]


def differences(methods: Sequence[Sequence[Scores]]) -> dict[tuple[int, int], Interval]:
    """Interval of method i minus method j for all i < j; methods[i][t] are its scores on task t.

    Every pair is compared on the items that both have. Pairs with the same items share their resamples; the figures
    are the same as pair by pair, and computed faster.
    """
    groups: dict[tuple[frozenset[Hashable], ...], list[tuple[int, int]]] = {}
    for i in range(len(methods)):
        for j in range(i + 1, len(methods)):
            items = tuple(frozenset(a.keys() & b.keys()) for a, b in zip(methods[i], methods[j], strict=True))
            groups.setdefault(items, []).append((i, j))
    found: dict[tuple[int, int], Interval] = {}
    for items, pairs in groups.items():
        members = sorted({place for pair in pairs for place in pair})
        columns = [
            np.array([[methods[m][t][key] for m in members] for key in methods[members[0]][t] if key in own])
            for t, own in enumerate(items)
        ]
        index = {place: column for column, place in enumerate(members)}
        found.update(_pairs(columns, pairs, index))
    return dict(sorted(found.items()))


def _pairs(
    columns: Sequence[Floats], pairs: Sequence[tuple[int, int]], index: Mapping[int, int]
) -> dict[tuple[int, int], Interval]:
    """columns: [n, members] per task, the same items for all members. index: method -> column."""
    left, right = ([index[pair[side]] for pair in pairs] for side in (0, 1))
    count = sum(map(len, columns))
    if not columns or min(map(len, columns)) < 2:
        return {
            pair: mean([column[:, [a, b]] if len(column) else column for column in columns], difference)
            for pair, a, b in zip(pairs, left, right, strict=True)
        }
    means = np.mean([column.mean(0) for column in columns], axis=0)
    draws = _draws(columns)
    apart = draws[:, left] - draws[:, right]
    bounds = np.quantile(apart, [(1 - LEVEL) / 2, (1 + LEVEL) / 2], axis=0)
    found = {}
    for k, (pair, a, b) in enumerate(zip(pairs, left, right, strict=True)):
        low, high = bounds[:, k]
        if agree(apart[:, k]):
            low, high = tied(difference, means[[a, b]], _fewest(columns), LEVEL)
        found[pair] = Interval(float(means[a] - means[b]), float(low), float(high), count)
    return found


def _fewest(tasks: Sequence[Floats]) -> int:
    """The number of items if every task had as many as the smallest."""
    return len(tasks) * min(map(len, tasks))


def _draws(tasks: Sequence[Floats]) -> Floats:
    """[draws, methods]: mean over tasks of the means of resampled items."""
    generator = np.random.default_rng(SEED)
    total = np.zeros((DRAWS, tasks[0].shape[1]))
    for task in tasks:
        chosen = generator.integers(0, len(task), (DRAWS, len(task)))
        # Multiply counts by scores, which avoids a [draws, n, methods] array.
        offsets = np.arange(DRAWS)[:, None] * len(task)
        counts = np.bincount((chosen + offsets).ravel(), minlength=DRAWS * len(task)).reshape(DRAWS, len(task))
        total += counts @ task / len(task)
    return total / len(tasks)

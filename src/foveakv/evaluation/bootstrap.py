"""Bootstrap intervals over items: of a mean, and of a paired difference.

Percentile bootstrap (Efron 1979): n items are resampled with replacement, and the interval is between quantiles of the
statistic over the resamples. It is slightly too narrow for few or nearly equal items: with 50 items and a level of 95%,
3,000 simulated samples each gave a coverage of 95% for shares of 0.8, 91% for shares of 0.95 and 94% for a skewed
continuous value (gamma, shape 4).

Special cases:
    no item                  mean, low and high are NaN
    one item                 the mean is its value, low and high are NaN
    all resamples agree      a bootstrap cannot know that other items may differ. For shares the bounds are exact
                             (`tied`): [0.0, 0.0] becomes [-0.095, 0.095] with 30 pairs that all tie. For other values
                             low and high are the mean.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from foveakv.errors import InputError

Floats = NDArray[np.float64]
K = TypeVar("K", bound=Hashable)

_BLOCK = 1 << 22
"""Upper bound of random numbers drawn at a time, which bounds memory."""


@dataclass(frozen=True)
class Interval:
    """An estimate from n items and its confidence interval. low, high: NaN if unknown."""

    mean: float
    low: float
    high: float
    n: int

    @property
    def known(self) -> bool:
        """Whether there are bounds."""
        return not (math.isnan(self.low) or math.isnan(self.high))

    def excludes(self, value: float) -> bool:
        """Whether the value is outside the interval; False without bounds."""
        return self.known and not self.low <= value <= self.high


def interval(
    values: Sequence[float] | Floats, level: float = 0.95, draws: int = 2000, seed: int = 0, *, shares: bool = False
) -> Interval:
    """Interval of the mean of values, one per item.

    Args:
        level: coverage, between 0 and 1.
        draws: number of resamples.
        seed: of the resamples.
        shares: the values are from 0 to 1; if all are equal, the bounds are those of `tied`.
    """
    rows = np.asarray(values, dtype=np.float64)[:, None]
    return _percentile(rows, lambda means: means[..., 0], level, draws, seed, shares)


def paired(
    a: Mapping[K, float],
    b: Mapping[K, float],
    level: float = 0.95,
    draws: int = 2000,
    seed: int = 0,
    *,
    shares: bool = False,
) -> Interval:
    """Interval of the mean of a - b over the items that both have; `n` is their number. The rest as for `interval`."""
    return _percentile(_common(a, b), lambda means: means[..., 0] - means[..., 1], level, draws, seed, shares)


def tied(statistic: Callable[[Floats], Floats], means: Floats, n: int, level: float = 0.95) -> tuple[float, float]:
    """Bounds of a statistic of shares if all n items (or all resamples of them) give the same value.

    At `level`, at most a share u = 1 - (1 - level)^(1 / n) of all items differs from those seen (about 3 / n, the rule
    of three). The bounds are the extremes of the statistic if that share has any scores from 0 to 1.

    Args:
        statistic: means [columns] -> a number; monotonic in each mean, so that its extremes are at corners.
        means: of the columns, 0 to 1.
        n: number of items.
    """
    u = 1 - (1 - level) ** (1 / n)
    corners = itertools.product((0.0, 1.0), repeat=len(means))
    found = [float(statistic((1 - u) * means + u * np.array(corner))) for corner in corners]
    known = [value for value in found if not math.isnan(value)]
    return min(known, default=math.nan), max(known, default=math.nan)


def agree(draws: Floats) -> bool:
    """Whether all resamples give the same value, up to rounding."""
    return bool(np.ptp(draws) <= 1e-12)


def _common(a: Mapping[K, float], b: Mapping[K, float]) -> Floats:
    """[n, 2]: the values of the items that both have, in a's order."""
    return np.array([(a[key], b[key]) for key in a if key in b], dtype=np.float64).reshape(-1, 2)


def _percentile(
    rows: Floats, statistic: Callable[[Floats], Floats], level: float, draws: int, seed: int, shares: bool
) -> Interval:
    """rows: [n, columns], an item each; statistic: means [..., columns] -> [...]."""
    if not 0 < level < 1 or draws < 1:
        raise InputError(f"an interval needs a level between 0 and 1 and at least one draw, got {level} and {draws}")
    n = len(rows)
    if n == 0:
        return Interval(math.nan, math.nan, math.nan, 0)
    estimate = float(statistic(rows.mean(0)))
    if n == 1 or math.isnan(estimate):
        return Interval(estimate, math.nan, math.nan, n)
    if (rows == rows[0]).all() and not shares:
        return Interval(estimate, estimate, estimate, n)
    found = statistic(_means(rows, draws, np.random.default_rng(seed)))
    found = found[~np.isnan(found)]
    if not len(found):
        return Interval(estimate, math.nan, math.nan, n)
    if shares and agree(found):
        return Interval(estimate, *tied(statistic, rows.mean(0), n, level), n)
    low, high = np.quantile(found, [(1 - level) / 2, (1 + level) / 2])
    return Interval(estimate, float(low), float(high), n)


def _means(rows: Floats, draws: int, generator: np.random.Generator) -> Floats:
    """[draws, columns]: the means of `draws` samples of n rows, drawn with replacement."""
    n, means, block = len(rows), [], max(1, _BLOCK // len(rows))
    for start in range(0, draws, block):
        chosen = generator.integers(0, n, (min(block, draws - start), n), dtype=np.int32)
        means.append(np.stack([column.take(chosen).mean(1) for column in rows.T], axis=1))
    return np.concatenate(means)

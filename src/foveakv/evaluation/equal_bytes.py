"""Accuracy of the methods at equal bytes: on the compute device, or on device and host together.

Budgets do not fix bytes: digests, a backing store and new tokens come on top. So accuracies are interpolated between
the neighbouring candidates of a series, linearly in the logarithm of the bytes, and never extrapolated.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

from foveakv.evaluation import stratified
from foveakv.evaluation.bootstrap import Floats, Interval
from foveakv.evaluation.figures import Candidate
from foveakv.evaluation.results import FULL
from foveakv.evaluation.summary import Summary

LEVELS = (0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.75)
"""Shares of a full cache's bytes at which methods are compared."""

Kind = Literal["total", "stored"]


@dataclass(frozen=True)
class At:
    """Mean accuracy of a series over the ranking tasks at a number of bytes. labels: the candidates that it is between
    (one if a candidate has these bytes)."""

    accuracy: Interval
    labels: tuple[str, ...]


def at(summary: Summary, series: str, share: float, kind: Kind = "total") -> At | None:
    """The accuracy of a series at a share of a full cache's bytes; None if no candidates are below and above it.

    kind: "total" counts bytes on device and host, "stored" those on the device.
    """
    points = []
    for candidate in summary.candidates:
        cost = _cost(summary, candidate, kind) if candidate.series == series else None
        if cost is not None:
            points.append((cost, candidate.label))
    points.sort()
    near = [(abs(cost - share), label) for cost, label in points if math.isclose(cost, share, rel_tol=0.02)]
    if near:
        label = min(near)[1]
        return At(summary.accuracy(summary.ranked, label), (label,))
    for (low, below), (high, above) in itertools.pairwise(points):
        if low < share < high:
            weight = math.log(share / low) / math.log(high / low)
            return At(_between(summary, below, above, weight), (below, above))
    return None


def table(summary: Summary, kind: Kind = "total") -> dict[str, dict[float, At]]:
    """Series -> share of bytes -> accuracy, for every series but the full cache and every share that it spans."""
    methods = {candidate.series: candidate.method for candidate in summary.candidates}
    found = {}
    for series in summary.series if summary.ranked else []:
        row = {share: one for share in LEVELS if (one := at(summary, series, share, kind)) is not None}
        if row and methods[series] != FULL:
            found[series] = row
    return found


def plain(summary: Summary) -> dict[str, dict[str, dict[str, dict[str, object]]]]:
    """Both tables as plain values for JSON."""
    kinds: tuple[Kind, ...] = ("total", "stored")
    return {
        kind: {
            series: {
                f"{share:g}": {
                    "accuracy": one.accuracy.mean,
                    "low": one.accuracy.low if one.accuracy.known else None,
                    "high": one.accuracy.high if one.accuracy.known else None,
                    "between": list(one.labels),
                }
                for share, one in row.items()
            }
            for series, row in table(summary, kind).items()
        }
        for kind in kinds
    }


def _cost(summary: Summary, candidate: Candidate, kind: Kind) -> float | None:
    """Mean over the ranking tasks of a candidate's share of bytes; None if a task lacks it."""
    costs = [getattr(summary.cells[task, candidate.label], kind) for task in summary.ranked]
    return None if None in costs or not costs or min(costs) <= 0 else fmean(costs)


def _between(summary: Summary, below: str, above: str, weight: float) -> Interval:
    """Interval of the interpolated accuracy, with the same resamples for both candidates."""
    pairs = [stratified.common([summary.scores(task, label) for label in (below, above)]) for task in summary.ranked]

    def mixed(means: Floats) -> Floats:
        return (1 - weight) * means[..., 0] + weight * means[..., 1]

    return stratified.mean(pairs, mixed)

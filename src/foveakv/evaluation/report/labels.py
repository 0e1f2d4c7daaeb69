"""Places for labels beside a plot: as near as possible to what they name, without overlap."""

from __future__ import annotations

from collections.abc import Sequence


def spread(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Places as near as possible to those wanted, at least `gap` apart and, if there is room, within low and high."""
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    groups: list[list[float]] = []  # [middle, count] of labels that touch each other
    for i in order:
        groups.append([wanted[i], 1])
        while len(groups) > 1 and _touch(groups[-2], groups[-1], gap):
            second, first = groups.pop(), groups.pop()
            count = first[1] + second[1]
            groups.append([(first[0] * first[1] + second[0] * second[1]) / count, count])
        _clamp(groups[-1], gap, low, high)
        while len(groups) > 1 and _touch(groups[-2], groups[-1], gap):
            second, first = groups.pop(), groups.pop()
            count = first[1] + second[1]
            groups.append([(first[0] * first[1] + second[0] * second[1]) / count, count])
            _clamp(groups[-1], gap, low, high)
    places = [middle + gap * (k - (count - 1) / 2) for middle, count in groups for k in range(int(count))]
    found = [0.0] * len(wanted)
    for i, place in zip(order, places, strict=True):
        found[i] = place
    return found


def _touch(lower: list[float], upper: list[float], gap: float) -> bool:
    return upper[0] - lower[0] < gap * (lower[1] + upper[1]) / 2 - 1e-9


def _clamp(group: list[float], gap: float, low: float, high: float) -> None:
    half = gap * (group[1] - 1) / 2
    group[0] = max(min(group[0], high - half), low + half)

"""Bootstrap intervals: by hand, at the edges, and how often they cover the truth."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from foveakv.errors import InputError
from foveakv.evaluation import stratified
from foveakv.evaluation.bootstrap import Interval, interval, paired


def test_two_items_by_hand() -> None:
    """Of two items 0 and 1 the means are 0, 1/2, 1 with 1/4, 1/2, 1/4: their 95% bounds are 0 and 1."""
    assert interval([0, 1]) == Interval(0.5, 0.0, 1.0, 2)
    assert interval([0, 1], level=0.4) == Interval(0.5, 0.5, 0.5, 2)


def test_bounds_are_the_normal_ones_for_many_items() -> None:
    values = np.random.default_rng(1).normal(3, 2, 400)
    found = interval(values, draws=8000)
    half = 1.96 * values.std() / math.sqrt(400)
    assert found.mean == pytest.approx(values.mean())
    assert found.low == pytest.approx(values.mean() - half, abs=0.05 * half)
    assert found.high == pytest.approx(values.mean() + half, abs=0.05 * half)
    narrower = interval(values, level=0.5)
    assert found.low < narrower.low < found.mean < narrower.high < found.high


def test_seeded() -> None:
    values = np.random.default_rng(1).random(30)
    assert interval(values) == interval(list(values))
    assert interval(values) != interval(values, seed=1)


def test_blocks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.random.default_rng(1).random(30)
    whole = interval(values, draws=100)
    monkeypatch.setattr("foveakv.evaluation.bootstrap._BLOCK", 7 * 30)
    assert interval(values, draws=100) == whole


def test_edges() -> None:
    none, one, same = interval([]), interval([0.25]), interval([0.5] * 9)
    assert none.n == 0
    assert math.isnan(none.mean)
    assert (one.mean, one.n) == (0.25, 1)
    assert not none.known
    assert not one.known
    assert not one.excludes(7)
    assert same == Interval(0.5, 0.5, 0.5, 9)
    assert same.excludes(0.4)
    with pytest.raises(InputError, match="level"):
        interval([1, 2], level=95)


def test_pairs_are_matched_by_key() -> None:
    generator = np.random.default_rng(2)
    items = {number: float(value) for number, value in enumerate(generator.random(40))}
    better = {number: value + 0.1 + 0.01 * generator.random() for number, value in reversed(items.items())}
    better[99] = 1000.0  # has no partner
    found = paired(better, items)
    assert found.n == 40
    assert 0.1 < found.low < found.mean < found.high < 0.11
    assert paired(items, better).mean == pytest.approx(-found.mean)
    # Apart, the items' spread hides the difference.
    assert interval([better[key] for key in items]).low < interval(list(items.values())).high
    assert paired({}, items).n == 0


def test_relative() -> None:
    def relative(a: dict[int, float], b: dict[int, float]) -> Interval:
        return stratified.mean([stratified.common([a, b])], stratified.relative)

    items = {number: 0.3 + 0.3 * (number % 3) for number in range(60)}
    less = {number: 0.9 * value for number, value in items.items()}
    assert relative(less, items).mean == pytest.approx(-0.1)
    noisy = {number: value * (0.8 if number % 2 else 1.0) for number, value in items.items()}
    found = relative(noisy, items)
    assert found.mean == pytest.approx(-0.1)
    assert found.low < -0.1 < found.high
    zero = relative(items, dict.fromkeys(items, 0.0))
    assert math.isnan(zero.mean)
    assert not zero.known
    rare = relative({0: 1.0, 1: 1.0}, {0: 0.0, 1: 1.0})  # a quarter of the draws has b's mean 0
    assert rare.mean == pytest.approx(1.0)
    assert (rare.low, rare.high) == (0.0, 1.0)


@pytest.mark.parametrize("kind", ["binary", "continuous"])
def test_coverage(kind: str) -> None:
    """Nominal 95% with 50 items; over 300 trials the share has a standard error of 1.3 points."""
    generator, trials, items = np.random.default_rng(3), 300, 50
    if kind == "binary":
        truth, samples = 0.8, (generator.random((trials, items)) < 0.8).astype(float)
    else:
        truth, samples = 2.0, generator.gamma(4.0, 0.5, (trials, items))
    found = [interval(sample, draws=600, seed=number) for number, sample in enumerate(samples)]
    covered = sum(each.low <= truth <= each.high for each in found) / trials
    assert 0.90 <= covered <= 0.98, covered


def test_draws_stay_within_tasks() -> None:
    """Tasks that differ among each other but not within: the bounds are those of as many items as the smallest has."""
    tasks = [np.full((5, 1), 0.2), np.full((3, 1), 0.8)]
    found = stratified.mean(tasks, stratified.first)
    u = 1 - 0.05 ** (1 / 6)
    assert (found.mean, found.n) == (pytest.approx(0.5), 8)
    assert (found.low, found.high) == (pytest.approx(0.5 * (1 - u)), pytest.approx(0.5 * (1 - u) + u))


def test_ties_have_exact_bounds() -> None:
    """Thirty pairs that tie: at most 1 - 0.05^(1/30) of all items differ, about the rule of three's 3 / 30."""
    values = {number: number % 2 for number in range(30)}
    u = 1 - 0.05 ** (1 / 30)
    assert u == pytest.approx(3 / 30, rel=0.06)
    tie = paired(values, values, shares=True)
    assert (tie.mean, tie.low, tie.high) == (0, pytest.approx(-u), pytest.approx(u))
    (both,) = stratified.differences([[values], [values]]).values()
    assert (both.low, both.high) == (tie.low, tie.high)
    right = interval([1.0] * 30, shares=True)
    assert (right.mean, right.low, right.high) == (1, pytest.approx(1 - u), 1)
    change = stratified.mean([stratified.common([values, values])], stratified.relative)
    assert (change.low, change.high) == (pytest.approx(-u / (0.5 * (1 - u) + u)), pytest.approx(u / (0.5 * (1 - u))))
    apart = paired(dict.fromkeys(range(30), 1.0), dict.fromkeys(range(30), 0.0), shares=True)
    assert (apart.low, apart.high) == (pytest.approx(1 - 2 * u), 1)


def test_exact_bounds_cover() -> None:
    """The true share is above the bound of a sample in which nothing differs in at most 5% of samples."""
    generator, items, share = np.random.default_rng(5), 20, 0.1
    samples = (generator.random((2000, items)) < share).astype(float)
    ties = [sample for sample in samples if not sample.any()]
    missed = len(ties) * (interval(ties[0], shares=True).high < share)
    assert missed / len(samples) <= 0.05


@pytest.mark.parametrize("tasks", [[], [np.zeros((0, 2))], [np.ones((4, 2)), np.zeros((0, 2))]])
def test_stratified_without_items(tasks: list[Any]) -> None:
    assert math.isnan(stratified.mean(tasks, stratified.difference).mean)


def test_one_item_has_no_bounds() -> None:
    found = stratified.mean([np.array([[0.5, 1.0]])], stratified.relative)
    assert (found.mean, found.known) == (-0.5, False)


def test_a_loss_of_nothing_is_no_number() -> None:
    assert math.isnan(stratified.mean([np.zeros((3, 2))], stratified.relative).mean)


def test_differences_are_those_of_paired() -> None:
    """With one task, and items that some methods lack, pair by pair the same as the bootstrap of a pair."""
    generator = np.random.default_rng(1)
    methods = [dict(enumerate(generator.random(12))) for _ in range(4)]
    del methods[2][5]
    for (i, j), found in stratified.differences([[method] for method in methods]).items():
        expected = paired(methods[i], methods[j])
        assert (found.mean, found.n) == (pytest.approx(expected.mean), expected.n)
        assert (found.low, found.high) == (pytest.approx(expected.low), pytest.approx(expected.high))

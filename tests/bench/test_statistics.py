"""Intervals cover what they say, and verdicts follow from them."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from thrifty.bench.statistics import Interval, difference, interval, ratio, reached, typical, verdict


@pytest.mark.parametrize(("rounds", "confidence"), [(3, 0.95), (5, 0.99), (7, 0.99)])
def test_the_interval_covers_the_true_value_as_often_as_it_says(rounds: int, confidence: float) -> None:
    rng = np.random.default_rng(1)
    draws = rng.normal(0.3, 0.2, size=(4000, rounds))
    missed = sum(interval(list(row), confidence).excludes(0.3) for row in draws)
    expected = 4000 * (1 - confidence)
    # Where the median lies outside of the mean's interval the interval is widened to it: it may cover more, not less.
    assert missed <= expected + 3 * math.sqrt(expected)
    assert missed >= expected / 2


def test_a_ratio_and_its_inverse_have_mirrored_intervals() -> None:
    row, base = [1.1, 1.25, 1.17, 1.3], [1.0, 1.05, 0.98, 1.1]
    there, back = ratio(row, base), ratio(base, row)
    assert there.low == pytest.approx(1 / back.high)
    assert there.high == pytest.approx(1 / back.low)


def test_noise_that_hits_a_whole_round_cancels() -> None:
    drift = [1.0, 3.0, 0.5, 2.0, 1.3]
    found = ratio([1.2 * d for d in drift], drift)
    assert (found.low, found.median, found.high) == pytest.approx((1.2, 1.2, 1.2))


def test_a_single_round_says_nothing() -> None:
    found = ratio([2.0], [1.0])
    assert math.isinf(found.high)
    assert verdict(found) == "not measured"


def test_verdicts() -> None:
    def made(low: float, high: float) -> Interval:
        return Interval((low + high) / 2, low, high, 5, 0.99)

    assert verdict(made(0.8, 0.9)) == "faster"
    assert verdict(made(1.05, 1.2)) == "slower"
    assert verdict(made(0.9, 1.01)) == "no difference"
    assert verdict(None) == "not measured"


def test_twenty_benches_of_equal_and_of_slower_rows() -> None:
    """What `benchmarks/bench_can_tell.py` measures, with noise of 2 % a process."""
    draw = random.Random(3)

    def process(factor: float) -> float:
        return factor * (1 + draw.gauss(0, 0.02))

    said: dict[float, list[str]] = {1.0: [], 1.1: []}
    for _ in range(200):
        for factor, words in said.items():
            row, base = [], []
            for _ in range(7):
                drift = 1 + draw.random()
                row.append(drift * process(factor))
                base.append(drift * math.sqrt(process(1) * process(1)))
            words.append(verdict(ratio(row, base)))
    assert said[1.0].count("no difference") >= 0.95 * 200
    assert said[1.1].count("slower") >= 0.9 * 200


def test_the_typical_step_ignores_a_stall_but_not_a_pattern() -> None:
    assert typical([1.0] * 19 + [50.0]) == pytest.approx(1.0)
    every_fourth = [1.0, 1.0, 1.0, 3.0] * 10
    assert 1.3 < typical(every_fourth) < 1.7


def test_differences_are_paired() -> None:
    found = difference([3.0, 4.0, 5.0], [3.1, 4.1, 5.1])
    assert (found.low, found.high) == pytest.approx((-0.1, -0.1))
    assert found.excludes(0.0)


def test_when_a_curve_reaches_a_loss() -> None:
    curve = [(10.0, 4.0), (20.0, 3.0), (30.0, 2.0)]
    assert reached(curve, 3.5) == pytest.approx(15.0)
    assert reached(curve, 4.5) == 10.0
    assert reached(curve, 1.0) is None


def test_no_value_has_no_interval() -> None:
    with pytest.raises(ValueError, match="at least one"):
        interval([], 0.95)

from __future__ import annotations

import math

import numpy as np
import pytest

from thrifty.report import text
from thrifty.report.series import Series, nice_ticks, series, smooth, thin


def make(values: list[float]) -> Series:
    return Series(np.arange(1.0, len(values) + 1), np.array(values))


def test_smoothing_keeps_a_straight_line_and_cuts_noise() -> None:
    line = make([3 - 0.01 * i for i in range(200)])
    np.testing.assert_allclose(smooth(line).values, line.values, atol=1e-12)
    noise = np.random.default_rng(0).normal(0, 0.1, 200)
    noisy = make((line.values + noise).tolist())
    error = smooth(noisy).values - line.values
    assert np.std(error[40:]) < 0.04


def test_smoothing_leaves_gaps() -> None:
    trend = smooth(make([1.0, math.nan, 1.0, 1.0, math.inf, 1.0, 1.0, 1.0]))
    assert trend.steps[np.isnan(trend.values)].tolist() == [2, 5]
    np.testing.assert_allclose(trend.finite.values, 1.0)


def test_thinning_keeps_spikes_gaps_and_ends() -> None:
    values = np.sin(np.arange(20_000) / 900)
    values[12_345] = 9.0
    values[4_000:4_050] = math.nan
    thinned = thin(make(values.tolist()), most=300)
    assert len(thinned) <= 310
    assert 9.0 in thinned.values
    assert np.isnan(thinned.values).any()
    assert (thinned.steps[0], thinned.steps[-1]) == (1, 20_000)


def test_series_reads_a_key_in_order_of_step_and_a_null_is_a_gap() -> None:
    rows = [{"kind": "train", "step": 2, "loss": 1.5}, {"kind": "train", "step": 1, "loss": None}]
    found = series([*rows, {"kind": "train", "step": 3}], "train", "loss")
    assert found.steps.tolist() == [1, 2]
    assert math.isnan(found.values[0])
    assert len(series([], "eval", "eval_loss")) == 0


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (2.41, 8.3), (0.0, 3e-4), (-5.0, 1e7), (0.0, 31_000.0)])
def test_ticks_are_round_and_inside(low: float, high: float) -> None:
    ticks = nice_ticks(low, high, 5)
    assert 3 <= len(ticks) <= 8
    assert low - 1e-9 <= ticks[0]
    assert ticks[-1] <= high * (1 + 1e-9)
    step = ticks[1] - ticks[0]
    assert f"{step:.0e}"[0] in "125"
    np.testing.assert_allclose(np.diff(ticks), step)


def test_numbers_at_the_edges() -> None:
    assert [text.count(v) for v in (0, 999, 999.7, 1e6, 2.5e12)] == ["0", "999", "1k", "1M", "2.5T"]
    assert [text.size(v) for v in (0, 1023, 2**30, 150 * 2**20)] == ["0 B", "1023 B", "1.0 GiB", "150 MiB"]
    assert [text.duration(v) for v in (0.44, 59.7, 86_400 * 3.5)] == ["0.4 s", "1 min 00 s", "3 d 12 h"]
    assert [text.number(v) for v in (True, 1e-6, math.nan, "x")] == ["true", "1e-6", "nan", "x"]

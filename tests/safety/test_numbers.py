from __future__ import annotations

import itertools
import json
import math
import random

import pytest
import torch

from pace import share_of_a_step
from thrifty.errors import InputError
from thrifty.safety.numbers import FiniteGuard, SpikeDetector, read_together

NAN, INF = math.nan, math.inf


def test_reads_both_numbers_in_one_copy() -> None:
    loss, norm = read_together(torch.tensor(2.5), torch.tensor(INF))
    assert loss == 2.5
    assert norm == INF
    assert read_together(None, torch.tensor(1.0)) == (0.0, 1.0)
    assert math.isnan(read_together(torch.tensor(NAN, dtype=torch.bfloat16), 3.0)[0])


@pytest.mark.parametrize(("loss", "norm"), [(NAN, 1.0), (1.0, NAN), (INF, 1.0), (1.0, -INF)])
def test_a_bad_step_is_skipped_and_named(loss: float, norm: float) -> None:
    verdict = FiniteGuard().check(loss, norm, step=12, sample_ids=[7, 9], last_good="out/checkpoint-10")
    assert verdict.action == "skip"
    assert verdict.message is not None
    assert all(part in verdict.message for part in ("step 12", "samples 7 9", "out/checkpoint-10", "1 of 3"))


def test_a_good_step_says_nothing() -> None:
    assert FiniteGuard().check(2.0, 1.0, step=1).action == "go"
    assert FiniteGuard().check(2.0, 1.0, step=1).message is None


def test_too_many_in_a_row_stop_and_a_good_one_resets() -> None:
    guard = FiniteGuard("skip", max_in_a_row=2)
    actions = [guard.check(x, 1.0, step=i).action for i, x in enumerate([NAN, NAN, 1.0, NAN, NAN, NAN])]
    assert actions == ["skip", "skip", "go", "skip", "skip", "stop"]


def test_counters_survive_a_resume() -> None:
    guard = FiniteGuard("skip", max_in_a_row=1)
    guard.check(NAN, 1.0, step=1)
    resumed = FiniteGuard("skip", max_in_a_row=1)
    resumed.load_state_dict(json.loads(json.dumps(guard.state_dict())))
    assert resumed.check(NAN, 1.0, step=2).action == "stop"
    assert resumed.total == 2


def test_rewind_needs_a_checkpoint_and_ends() -> None:
    guard = FiniteGuard("rewind", max_in_a_row=2)
    assert guard.check(NAN, 1.0, step=1).action == "skip"  # nothing to go back to
    actions = [guard.check(NAN, 1.0, step=5, last_good="checkpoint-4").action for _ in range(3)]
    assert actions == ["rewind", "rewind", "stop"]


def test_stop_stops_at_once_and_an_unknown_policy_is_refused() -> None:
    verdict = FiniteGuard("stop").check(NAN, 1.0, step=3)
    assert verdict.action == "stop"
    assert "weights are still finite" in str(verdict.message)
    with pytest.raises(InputError, match=r"on_non_finite='ignore'.*Fix: use skip, rewind or stop"):
        FiniteGuard("ignore")  # type: ignore[arg-type]


def test_a_gradient_scaler_may_search_its_scale() -> None:
    guard = FiniteGuard("stop", loss_scaling=True, max_scaler_skips=4)
    assert [guard.check(1.0, INF, step=i).action for i in range(5)] == ["go"] * 4 + ["stop"]
    assert FiniteGuard("stop", loss_scaling=True).check(NAN, INF, step=1).action == "stop"


def test_spikes_are_reported_and_noise_is_not() -> None:
    rng, detector = random.Random(0), SpikeDetector()
    for step in range(300):
        assert detector.check(3.0 * 0.995**step + rng.gauss(0, 0.05), step) is None
    line = detector.check(9.0, 300, sample_ids=["a"])
    assert line is not None
    assert "step 300" in line
    assert "samples a" in line
    assert detector.check(0.7, 301) is None, "the spike did not move the threshold"
    assert detector.check(NAN, 302) is None


def test_a_level_shift_becomes_normal_and_the_window_survives_a_resume() -> None:
    detector = SpikeDetector(window=20, warm_up=5)
    for step in range(20):
        detector.check(1.0, step)
    assert detector.check(5.0, 20) is not None
    resumed = SpikeDetector(window=20, warm_up=5)
    resumed.load_state_dict(json.loads(json.dumps(detector.state_dict())))
    lines = [resumed.check(5.0, step) for step in range(21, 45)]
    assert lines[0] is not None
    assert lines[-1] is None


def test_both_cost_little() -> None:
    guard, detector = FiniteGuard(), SpikeDetector()
    steps = itertools.count()

    def look() -> None:
        step = next(steps)
        guard.check(1.0 + step % 7, 1.0, step)
        detector.check(1.0 + step % 7, step)

    assert share_of_a_step(look) < 0.1

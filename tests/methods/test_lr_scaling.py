"""Learning-rate scaling: the arithmetic, the ramp, and what a run's optimizer really gets."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

import tiny
from methods import loops
from thrifty import InputError, NotApplicable, Recipe
from thrifty.methods.large_batch.lr_scaling import add_ramp, ramp, scale_factor


def test_k_small_steps_are_one_step_with_the_k_fold_rate():
    """At fixed weights, k SGD steps of size eta move as far as one step of size k eta on the mean of the gradients."""
    torch.manual_seed(0)
    w, x, y = torch.randn(3), torch.randn(8, 3), torch.randn(8)

    def gradient(rows: slice) -> torch.Tensor:
        v = w.clone().requires_grad_()
        ((x[rows] @ v - y[rows]) ** 2).mean().backward()
        assert v.grad is not None
        return v.grad

    eta, k = 0.01, 4
    many = sum(eta * gradient(slice(2 * i, 2 * i + 2)) for i in range(k))
    torch.testing.assert_close(many, eta * scale_factor(8, 2) * gradient(slice(0, 8)))


def test_schedule_at_start_end_of_ramp_and_end_of_run():
    assert [ramp(t, 10, 8.0) * 8.0 * 0.1 for t in (0, 5, 10, 100)] == pytest.approx([0.1, 0.45, 0.8, 0.8])
    assert scale_factor(256, 256) == 1.0


def _rates(folder, settings, **overrides):
    run = tiny.trainer(folder, [{"lr-scaling": settings}], max_steps=4, warmup_steps=0, optim="sgd", **overrides)
    run.train()
    return [row["learning_rate"] for row in run.state.log_history if "learning_rate" in row]


def test_rates_of_a_run(tmp_path):
    """Batch 4 = 4 x 1: the linear schedule of the fourfold rate, under a ramp from 1/4 over 2 steps."""
    settings = {"base_batch_size": 1, "warmup_steps": 2}
    wanted = [0.01 * f for f in (4 * 0.25, 4 * 0.75 * 0.625, 4 * 0.5, 4 * 0.25)]
    assert _rates(tmp_path, settings, per_device_train_batch_size=4) == pytest.approx(wanted)
    # Steps of the optimizer count, not micro-batches.
    more = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    assert _rates(tmp_path, settings, **more) == pytest.approx(wanted)
    wanted = [0.01 * 2 * f for f in (1, 0.75, 0.5, 0.25)]
    settings = {"base_batch_size": 1, "rule": "sqrt", "warmup_steps": 0}
    assert _rates(tmp_path, settings, per_device_train_batch_size=4) == pytest.approx(wanted)


def test_the_base_batch_changes_nothing(tmp_path):
    plain = tiny.trainer(tmp_path / "a")
    scaled = tiny.trainer(tmp_path / "b", [{"lr-scaling": {"base_batch_size": 2}}])
    plain.train()
    scaled.train()
    tiny.assert_same(tiny.weights(plain.model), tiny.weights(scaled.model))


@pytest.mark.parametrize("name", ["muon", "lion", "adafactor", "lamb", "adamw"])
def test_optimizers_take_the_scaled_rate(tmp_path, name):
    plain = tiny.trainer(tmp_path, [name]).create_optimizer()
    scaled = tiny.trainer(tmp_path, [name, {"lr-scaling": {"base_batch_size": 1}}]).create_optimizer()
    assert [g["lr"] for g in scaled.param_groups] == pytest.approx([2 * g["lr"] for g in plain.param_groups])


def test_the_ramp_survives_a_growing_model(tmp_path):
    methods = [
        {"stacking": {"start_layers": 1, "boundaries": [0.34]}},
        {"lr-scaling": {"base_batch_size": 1, "warmup_steps": 5}},
    ]
    run = loops.resumes(tmp_path, methods, tiny.llama, max_steps=6, step=3, warmup_steps=0)
    rates = [row["learning_rate"] for row in run.state.log_history if "learning_rate" in row]
    assert rates == pytest.approx([0.02 * (1 - t / 6) * ramp(t, 5, 2.0) for t in range(6)])


def test_in_ones_own_loop():
    def make():
        model = tiny.llama()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * scale_factor(4, 1))
        schedule = LambdaLR(optimizer, lambda step: 1.0)
        add_ramp(schedule, 2, 4.0)
        seen.append(optimizer.param_groups[0]["lr"])
        return loops.Setup(model, optimizer, after_step=lambda step: schedule.step())

    seen: list[float] = []
    setup, _ = loops.both_loops(make)
    assert seen[0] == pytest.approx(0.1)
    assert setup.optimizer.param_groups[0]["lr"] == pytest.approx(0.4)


def test_a_ramp_on_a_ramp_is_one():
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=1.0)
    schedule = LambdaLR(optimizer, lambda step: 1.0)
    for _ in range(2):
        add_ramp(schedule, 4, 2.0)
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_refused(tmp_path):
    with pytest.raises(NotApplicable, match="lr_scheduler_type"):
        tiny.trainer(tmp_path, ["lr-scaling"], lr_scheduler_type="reduce_lr_on_plateau", eval_strategy="steps")
    for bad in ({"base_batch_size": 0}, {"warmup_steps": -1}):
        with pytest.raises(InputError, match=next(iter(bad))):
            Recipe.parse([{"lr-scaling": bad}])

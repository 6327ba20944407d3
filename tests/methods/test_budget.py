"""Budgets: the rate is zero at the end, the run ends nearest to the budget, and a resume spends no more."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR

import tiny
from methods import loops
from thrifty import InputError, NotApplicable, Recipe
from thrifty.methods.large_batch.budget import Meter, rate_at, step_flops


@pytest.mark.parametrize("decay", ["linear", "cosine", "wsd"])
def test_rates_rise_once_and_decay_to_zero(decay):
    points = [rate_at(p / 100, 0.1, decay) for p in range(101)]
    assert points[0] == 0
    assert points[10] == pytest.approx(1)
    assert points[-1] == 0
    assert points[:11] == sorted(points[:11])
    assert points[10:] == sorted(points[10:], reverse=True)
    assert rate_at(1.5, 0.1, decay) == 0


@pytest.mark.parametrize("cost", [1.0, 3.0, 7.0, 9.9, 40.0])
def test_the_end_is_within_half_a_step(cost):
    meter = Meter(100.0)
    while not meter.is_over:
        meter.spend(cost)
    assert abs(meter.used - 100) <= cost / 2 + 1e-9


def _rows(run: Any, key: str = "learning_rate") -> list[float]:
    return [row[key] for row in run.state.log_history if key in row]


def _real_tokens(count: int) -> int:
    return sum(len(s["input_ids"]) for s in tiny.text_samples()[:count])


@pytest.mark.parametrize("split", [(4, 1), (1, 4)])
def test_tokens_without_padding(tmp_path, split):
    """24 samples are one epoch: its tokens are the budget, so the run ends with it, whatever the order."""
    size, accumulation = split
    run = tiny.trainer(tmp_path, [{"budget": {"tokens": _real_tokens(24), "warmup": 0.0}}], max_steps=-1,
                       per_device_train_batch_size=size, gradient_accumulation_steps=accumulation)  # fmt: skip
    run.train()
    assert run.state.global_step == 6
    meter = run.recipe["budget"].meter
    assert meter.used == meter.total == _real_tokens(24)
    rates = _rows(run)
    assert rates[0] == 0.01
    assert rates == sorted(rates, reverse=True)
    assert run.ctx.optimizer.param_groups[0]["lr"] == 0  # the schedule has decayed to the budget
    assert 0 < rates[-1] < 0.01 * 0.35  # the last update had the share that its tokens are


def test_flops_of_a_step():
    llama, vit = tiny.llama(), tiny.vit()
    body = sum(p.numel() for n, p in llama.named_parameters() if "embed_tokens" not in n)
    assert step_flops(llama, {"input_ids": torch.ones(2, 7)}) == 6 * 14 * body
    images = {"pixel_values": torch.zeros(3, 1, 8, 8)}
    assert step_flops(vit, images) == 6 * 3 * 4 * sum(p.numel() for p in vit.parameters())


@pytest.mark.parametrize("family", ["llama", "bert", "vit"])
def test_a_budget_of_flops(tmp_path, family):
    run = tiny.trainer(tmp_path, [{"budget": {"flops": 1.5e7}}], tiny.FAMILIES[family](), max_steps=-1)
    run.train()
    meter = run.recipe["budget"].meter
    assert abs(meter.used - 1.5e7) <= meter.step_cost
    assert _rows(run)[-1] < 0.2 * max(_rows(run))


def test_minutes_follow_the_clock(tmp_path):
    """A clock that ticks 6 s a look: a budget of a minute is ten steps, and the rate is zero at its end."""
    run = tiny.trainer(tmp_path, [{"budget": {"minutes": 1.0, "warmup": 0.0}}], max_steps=-1)
    ticks = itertools.count(0, 6)
    run.recipe["budget"].clock = lambda: float(next(ticks))
    run.train()
    assert run.state.global_step == 10
    assert _rows(run) == pytest.approx([0.01 * (1 - t / 10) for t in range(10)])
    assert run.ctx.optimizer.param_groups[0]["lr"] == pytest.approx(0)


def test_a_resumed_time_budget_counts_what_was_used(tmp_path):
    methods = [{"budget": {"minutes": 1.0, "warmup": 0.0}}]
    now = [0.0]

    def clock() -> float:
        now[0] += 6
        return now[0]

    first = tiny.trainer(tmp_path, methods, max_steps=4, save_strategy="steps", save_steps=4)
    first.recipe["budget"].clock = clock
    first.train()
    used = first.recipe["budget"].meter.used
    second = tiny.trainer(tmp_path / "again", methods, max_steps=4)
    second.recipe["budget"].clock = lambda: 1e6  # hours later: the pause costs nothing
    second._load_extra_state(str(tmp_path / "checkpoint-4"))
    assert second.recipe["budget"].meter.used == pytest.approx(used + 0.1)  # and the time since the last step does


def test_the_nearer_end_decides(tmp_path):
    run = tiny.trainer(tmp_path, [{"budget": {"tokens": 10_000, "warmup": 0.0}}], max_steps=4)
    run.train()
    assert run.state.global_step == 4
    assert _rows(run) == pytest.approx([0.01 * (1 - t / 4) for t in range(4)])


@pytest.mark.parametrize("step", [1, 3, 5])
def test_resume_is_exact_and_ends_at_the_same_step(tmp_path, step):
    method = {"budget": {"tokens": _real_tokens(24), "decay": "cosine"}}
    overrides = {"max_steps": -1, "per_device_train_batch_size": 4}
    full = tiny.trainer(tmp_path / "full", [method], tiny.llama(dropout=0.1), save_strategy="steps", save_steps=1,
                        **overrides)  # fmt: skip
    full.train()
    again = tiny.trainer(tmp_path / "again", [method], tiny.llama(dropout=0.1), **overrides)
    again.train(resume_from_checkpoint=str(tmp_path / "full" / f"checkpoint-{step}"))
    tiny.assert_same(tiny.weights(again.model), tiny.weights(full.model))
    assert _rows(again) == _rows(full)
    assert again.state.global_step == full.state.global_step == 6
    assert (tmp_path / "full" / "checkpoint-6").is_dir()


def test_nothing_is_left_to_spend(tmp_path):
    method = {"budget": {"tokens": _real_tokens(24)}}
    overrides = {"max_steps": -1, "per_device_train_batch_size": 4}
    full = tiny.trainer(tmp_path, [method], save_strategy="steps", save_steps=1, **overrides)
    full.train()
    again = tiny.trainer(tmp_path / "again", [method], **overrides)
    with pytest.raises(InputError, match=r"tokens are used up .* Fix: give more"):
        again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))


def test_in_ones_own_loop():
    def make():
        model = tiny.llama()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        meter = Meter(4.0)
        schedule = LambdaLR(optimizer, lambda _: rate_at(meter.progress))

        def after(step: int) -> None:
            meter.spend(1.0)
            schedule.step()

        return loops.Setup(model, optimizer, after_step=after)

    setup, _ = loops.both_loops(make)
    assert setup.optimizer.param_groups[0]["lr"] == 0


def test_refused(tmp_path):
    with pytest.raises(NotApplicable, match="none is given"):
        tiny.trainer(tmp_path, ["budget"])
    with pytest.raises(NotApplicable, match=r"stacking acts at shares .* Fix: set max_steps"):
        tiny.trainer(tmp_path, [{"budget": {"tokens": 100}}, "stacking"], tiny.llama(4), max_steps=-1)
    with pytest.raises(NotApplicable, match="no tokens to count"):
        tiny.trainer(tmp_path, [{"budget": {"tokens": 100}}], tiny.vit())
    for bad in ({"tokens": 10, "minutes": 1}, {"flops": -1.0}, {"tokens": 10, "warmup": 1.0}):
        with pytest.raises(InputError, match=list(bad)[-1]):
            Recipe.parse([{"budget": bad}])

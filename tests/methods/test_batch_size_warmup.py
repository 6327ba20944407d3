"""Batch-size warm-up: the schedule, that every sample is seen once and weighs the same, and exact resume."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import TrainerCallback

import tiny
from methods import loops
from thrifty import InputError, NotApplicable, Recipe
from thrifty.methods.large_batch.batch_size_warmup import BatchCutter, batch_size_at, steps_for

GROWING = {"batch-size-warmup": {"start": 1, "increment": 1, "ramp_samples": 9}}


def test_schedule_reaches_the_full_batch():
    sizes, seen = [], 0
    for _ in range(12):
        sizes.append(batch_size_at(seen, 1, 4, 1, 9))
        seen += sizes[-1]
    assert sizes == [1, 1, 1, 2, 2, 3, 4, 4, 4, 4, 4, 4]
    assert batch_size_at(0, 8, 8, 2, 100) == 8
    assert batch_size_at(50, 2, 8, 5, 100) == 7  # a last increment that is cut at the full batch


@pytest.mark.parametrize("total", [1, 8, 9, 10, 37])
def test_steps_for_a_number_of_samples(total):
    seen = steps = 0
    while seen < total:
        seen += batch_size_at(seen, 1, 4, 1, 9)
        steps += 1
    assert steps_for(total, 1, 4, 1, 9) == steps


def test_the_cutter_loses_and_repeats_nothing():
    source = iter(loops.loader(tiny.llama(), count=24, size=4))
    cutter = BatchCutter(lambda: next(source), 4)
    steps = [cutter.take(n) for n in (1, 2, 5, 4, 3, 6)]
    assert [[len(b["input_ids"]) for b in step] for step in steps] == [[1], [2], [4, 1], [4], [3], [4, 2]]
    rows = [row[row != 0].tolist() for step in steps for b in step for row in b["input_ids"]]
    assert rows == [sample["input_ids"] for sample in tiny.text_samples()[:21]]


class Sizes(TrainerCallback):
    def __init__(self, run: Any) -> None:
        self.run, self.ids = run, []

    def on_pre_optimizer_step(self, *args, **kwargs):
        self.ids.append([int(i) for part in self.run.sample_ids for i in part])


@pytest.mark.parametrize("split", [(4, 1), (2, 2), (1, 4)])
def test_samples_of_each_step(tmp_path, split):
    size, accumulation = split
    run = tiny.trainer(tmp_path, [GROWING], max_steps=9, per_device_train_batch_size=size,
                       gradient_accumulation_steps=accumulation)  # fmt: skip
    sizes = Sizes(run)
    run.add_callback(sizes)
    passes = loops.count_calls(run.model.model.layers[0])
    run.add_callback(loops.LastStep(passes))
    run.train()
    assert [len(step) for step in sizes.ids] == [1, 1, 1, 2, 2, 3, 4, 4, 4]
    seen = [i for step in sizes.ids for i in step]
    assert len(set(seen)) == len(seen) == 22  # less than one epoch: no sample twice
    assert run.recipe["batch-size-warmup"].seen == 22
    assert len(passes) == accumulation


def test_small_steps_run_fewer_micro_batches(tmp_path):
    run = tiny.trainer(tmp_path, [GROWING], max_steps=1, per_device_train_batch_size=1, gradient_accumulation_steps=4)
    passes = loops.count_calls(run.model.model.layers[0])
    run.add_callback(loops.LastStep(passes))
    run.train()
    assert len(passes) == 1


@pytest.mark.parametrize("family", ["llama", "bert", "vit"])
def test_a_step_is_the_mean_over_its_samples(tmp_path, family):
    """Whatever the micro-batches: 3 samples as 3, as 2 + 1 and as 1 + 1 + 1. ViT gives a mean loss, not a sum."""
    method = {"batch-size-warmup": {"start": 3, "ramp_samples": 100}}
    results = []
    for size, accumulation in ((4, 1), (2, 2), (1, 4)):
        run = tiny.trainer(tmp_path / str(size), [method], tiny.FAMILIES[family](), max_steps=3, optim="sgd",
                           max_grad_norm=0.0, per_device_train_batch_size=size,
                           gradient_accumulation_steps=accumulation)  # fmt: skip
        run.train()
        results.append(tiny.weights(run.model))
    for other in results[1:]:
        tiny.assert_same(results[0], other, atol=1e-6)


@pytest.mark.parametrize("step", [2, 4, 6])
def test_resumes_with_samples_left_over(tmp_path, step):
    loops.resumes(tmp_path, [GROWING], lambda: tiny.llama(dropout=0.1), max_steps=9, step=step,
                  per_device_train_batch_size=2, gradient_accumulation_steps=2)  # fmt: skip


def test_phases():
    method: Any = Recipe.parse(["batch-size-warmup"])["batch-size-warmup"]
    phases = method.phases(None, 1000)
    assert sum(phase.steps for phase in phases) == 1000
    samples = sum(phase.steps * phase.batch for phase in phases[:-1])
    assert samples == pytest.approx(200, abs=1)  # full batches: the ramp is a fifth of the run's samples


def test_in_ones_own_loop():
    model = tiny.llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    source = iter(loops.loader(model, count=24, size=4))
    cutter, seen, losses = BatchCutter(lambda: next(source), 4), 0, []
    for _ in range(4):
        (batch,) = cutter.take(batch_size_at(seen, 1, 4, 1, 9))
        seen += len(batch["input_ids"])
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert seen == 5
    assert all(torch.isfinite(torch.tensor(losses)))


def test_refused(tmp_path):
    with pytest.raises(NotApplicable, match=r"max_steps: 16, which sees 24 samples"):
        tiny.trainer(
            tmp_path, [{"batch-size-warmup": {"start": 1, "ramp_samples": 8}}], max_steps=-1, num_train_epochs=1
        )
    with pytest.raises(NotApplicable, match="nothing to grow"):
        tiny.trainer(tmp_path, [{"batch-size-warmup": {"start": 2}}])
    for key in ("start", "increment", "ramp_samples"):
        with pytest.raises(InputError, match=key):
            Recipe.parse([{"batch-size-warmup": {key: 0}}])

"""Data loading: the same samples with any number of processes, chosen by measuring, and the time that is waited."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

import thrifty
import tiny
from methods import loops
from thrifty import InputError, Recipe
from thrifty.methods.data_loading import data_loading
from thrifty.methods.data_loading.data_loading import WaitClock, batch_seconds, choose_workers, step_seconds


class Slow:
    """Samples that take their time."""

    def __init__(self, seconds: float, count: int = 16) -> None:
        self.seconds, self.samples = seconds, tiny.text_samples()[:count]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):  # the validation data
            return self.samples[index]
        time.sleep(self.seconds)
        return self.samples[index]


def _trainer(folder: Any, methods: list[Any], samples: Any, model: Any = None) -> thrifty.Trainer:
    """Without guards, which look at samples themselves."""
    return thrifty.Trainer(
        model or tiny.llama(dropout=0.1),
        tiny.arguments(folder, max_steps=4),
        train_dataset=samples,
        data_collator=tiny.collate_text,
        methods=methods,
        guards=False,
    )


def _run(folder: Any, methods: list[Any], samples: Any) -> thrifty.Trainer:
    run = _trainer(folder, methods, samples)
    run.train()
    return run


def test_the_number_of_processes_does_not_change_the_run(tmp_path):
    plain = _run(tmp_path / "plain", [], tiny.text_samples())
    for workers in (0, 2):
        run = _run(tmp_path / str(workers), [{"data-loading": {"num_workers": workers}}], tiny.text_samples())
        assert run.args.dataloader_num_workers == workers
        assert tiny.losses(run) == tiny.losses(plain)
        tiny.assert_same(tiny.weights(run.model), tiny.weights(plain.model))


def test_processes_hide_slow_samples_and_the_wait_is_reported(tmp_path):
    """Batches of two slow samples: 0.12 s each, and nearly all of the time."""
    shares, times = [], []
    for workers in (0, 2):
        start = time.perf_counter()
        run = _run(tmp_path / str(workers), [{"data-loading": {"num_workers": workers}}], Slow(0.06))
        times.append(time.perf_counter() - start)
        shares.append(run.recipe["data-loading"].clock.share)
        assert "of the time" in run.recipe["data-loading"].facts()["waiting for data"]
    assert shares[0] > 0.6
    assert times[1] < times[0] - 0.1


def test_measures_batches_and_steps(tmp_path, monkeypatch):
    monkeypatch.setattr(data_loading, "spare_cores", lambda processes: 3)
    run = _trainer(tmp_path / "slow", ["data-loading"], Slow(0.2))
    method = run.recipe["data-loading"]
    making, computing = method.measured
    assert making == pytest.approx(0.4, abs=0.1)
    assert 0 < computing < 0.4
    assert method.workers == run.args.dataloader_num_workers == choose_workers(making, computing, 3) >= 1
    assert run.args.dataloader_prefetch_factor == 2
    assert run.args.dataloader_persistent_workers
    monkeypatch.setattr(data_loading, "batch_seconds", lambda *args: 0.0)
    ready = _trainer(tmp_path / "ready", ["data-loading"], tiny.text_samples())
    assert ready.recipe["data-loading"].workers == ready.args.dataloader_num_workers == 0
    assert ready.args.dataloader_prefetch_factor is None


def test_measuring_leaves_no_trace():
    model = tiny.gpt2(dropout=0.1).eval()
    batch = loops.batch(model)
    before, state = tiny.weights(model), torch.get_rng_state()
    assert step_seconds(model, batch) > 0
    assert batch_seconds(tiny.text_samples(), tiny.collate_text, 4) > 0
    tiny.assert_same(tiny.weights(model), before)
    assert torch.equal(torch.get_rng_state(), state)
    assert not model.training
    assert all(p.grad is None for p in model.parameters())


def test_a_batch_that_does_not_fit_is_measured_in_parts():
    model = tiny.llama()
    rows = []

    def full(module: Any, args: Any, kwargs: Any) -> None:
        rows.append(len(kwargs["input_ids"]))
        if rows[-1] > 2:
            raise torch.OutOfMemoryError("out of memory")

    model.register_forward_pre_hook(full, with_kwargs=True)
    assert step_seconds(model, loops.batch(model, size=4)) > 0
    assert rows == [4, 2, 2, 2]


def test_the_clock():
    clock = WaitClock()
    fetch = clock.timed(lambda: time.sleep(0.05) or 7)
    assert clock.share == 0.0
    for _ in range(3):
        assert fetch() == 7
        time.sleep(0.05)
    assert 0.4 < clock.share < 0.8


def test_resumes_with_the_number_that_was_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(data_loading, "spare_cores", lambda processes: 0)
    full = tiny.trainer(tmp_path / "full", [{"data-loading": {"num_workers": 1}}], tiny.llama(dropout=0.1),
                        max_steps=3, save_strategy="steps", save_steps=1)  # fmt: skip
    full.train()
    again = tiny.trainer(tmp_path / "again", ["data-loading"], tiny.llama(dropout=0.1), max_steps=3)
    assert again.args.dataloader_num_workers == 0
    again.train(resume_from_checkpoint=str(tmp_path / "full" / "checkpoint-1"))
    assert again.args.dataloader_num_workers == 1
    assert tiny.losses(again) == tiny.losses(full)


def test_refusals(tmp_path):
    with pytest.raises(InputError, match="dataloader_num_workers"):
        tiny.trainer(tmp_path, ["data-loading"], dataloader_num_workers=2)
    for bad in ({"num_workers": -1}, {"prefetch_factor": 0}):
        with pytest.raises(InputError, match=next(iter(bad))):
            Recipe.parse([{"data-loading": bad}])

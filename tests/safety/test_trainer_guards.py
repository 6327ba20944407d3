"""The guards inside a real trainer, each met by its real fault."""

from __future__ import annotations

import os
import signal

import pytest
import torch
from transformers import TrainerCallback

import tiny
from faults import exhaust
from thrifty.errors import InputError
from thrifty.safety.numbers import NonFinite
from thrifty.safety.options import Guards
from thrifty.safety.signals import Interrupted


class At(TrainerCallback):
    """Acts at the beginning of one step."""

    def __init__(self, step, act):
        self.step, self.act = step, act

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            self.act()


def spoil(run, step, times=1):
    """Makes the loss of the `step`-th optimizer step NaN, `times` times."""
    left = [times]
    original = run.compute_loss

    def compute_loss(model, *args, **kwargs):
        loss = original(model, *args, **kwargs)
        if model.training and run.state.global_step == step - 1 and left[0]:
            left[0] -= 1
            return loss * float("nan")
        return loss

    run.compute_loss = compute_loss


# --- numbers ---


def test_nan_step_is_skipped_and_told(tmp_path, capsys):
    run = tiny.trainer(tmp_path, (), tiny.llama(), max_steps=8, save_strategy="steps", save_steps=2)
    spoil(run, 5)
    run.train()
    losses = tiny.losses(run)
    assert [i + 1 for i, loss in enumerate(losses) if loss != loss] == [5], "the NaN is shown once, and only there"
    assert all(torch.isfinite(p).all() for p in run.model.parameters())
    told = capsys.readouterr().out
    assert "step 5: loss nan, samples " in told
    assert "checkpoint-4" in told
    good = [loss for loss in losses if loss == loss]
    assert run.state.log_history[-1]["train_loss"] == pytest.approx(sum(good) / len(good), rel=0.02)


def test_too_many_in_a_row_stop(tmp_path):
    run = tiny.trainer(tmp_path, (), tiny.llama(), max_steps=12)
    original = run.compute_loss
    run.compute_loss = lambda *a, **k: original(*a, **k) * float("nan")
    with pytest.raises(NonFinite, match="4 steps in a row"):
        run.train()
    assert all(torch.isfinite(p).all() for p in run.model.parameters())


def test_stop_policy_keeps_finite_weights(tmp_path):
    run = tiny.trainer(tmp_path, (), tiny.llama(), max_steps=6)
    run.guards.on_non_finite = "stop"
    spoil(run, 3)
    with pytest.raises(NonFinite, match="step 3"):
        run.train()
    assert run.state.global_step == 2
    assert all(torch.isfinite(p).all() for p in run.model.parameters())


@pytest.mark.parametrize("methods", [[], [{"stacking": {"start_layers": 1, "boundaries": [0.5]}}]])
def test_rewind_goes_back_and_leaves_the_batch_out(tmp_path, methods, capsys):
    """Also across a growth: the NaN comes at step 6, the model grew at step 4, the checkpoint is of step 3."""
    run = tiny.trainer(tmp_path, methods, tiny.llama(), max_steps=8, save_strategy="steps", save_steps=3)
    run.guards.on_non_finite = "rewind"
    spoil(run, 6)
    run.train()
    assert run.state.global_step == 8
    assert "going back to it" in capsys.readouterr().out
    assert all(torch.isfinite(p).all() for p in run.model.parameters())
    assert len(run.model.model.layers) == 2


# --- memory ---


@pytest.mark.parametrize("after_backward", [False, True])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_oom_gives_the_run_of_the_smaller_micro_batch(tmp_path, after_backward, accumulation, capsys):
    settings = {"max_steps": 5, "per_device_train_batch_size": 4, "gradient_accumulation_steps": accumulation}
    plain = tiny.trainer(tmp_path / "a", (), tiny.llama(), **settings)
    plain.train()
    struck = tiny.trainer(tmp_path / "b", (), tiny.llama(), **settings)
    exhaust(struck, step=3, occurrence=accumulation, part="after-backward" if after_backward else "backward")
    struck.train()
    assert struck.state.global_step == 5
    assert "micro-batches of 2 rows" in capsys.readouterr().out
    tiny.assert_same(tiny.weights(plain.model), tiny.weights(struck.model), atol=2e-5)
    assert tiny.losses(struck) == pytest.approx(tiny.losses(plain), abs=1e-5)


def test_single_sample_that_does_not_fit_is_an_error_with_advice(tmp_path):
    run = tiny.trainer(tmp_path, (), tiny.llama(), per_device_train_batch_size=1)
    original = run.accelerator.backward

    def backward(loss, **kwargs):
        if run.state.global_step == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. (injected)")
        original(loss, **kwargs)

    run.accelerator.backward = backward
    with pytest.raises(InputError, match=r"(?s)does not fit.*frees about.*frees about.*frees about"):
        run.train()


def test_trial_step_changes_nothing(tmp_path):
    without = tiny.trainer(tmp_path / "b", (), tiny.llama(dropout=0.1))
    without.guards.trial_step = False
    without.train()
    with_trial = tiny.trainer(tmp_path / "a", (), tiny.llama(dropout=0.1))
    calls = []
    original = with_trial.accelerator.backward
    with_trial.accelerator.backward = lambda loss, **k: (calls.append(1), original(loss, **k))
    with_trial.train()
    assert len(calls) == 6 + 2, "the trial runs the longest batch twice before the first step"
    tiny.assert_same(tiny.weights(with_trial.model), tiny.weights(without.model))
    assert tiny.losses(with_trial) == tiny.losses(without)


# --- resume ---


def resumed(tmp_path, first, then, stop_at, **both):
    """A run that stops at a step, and a resumed one with other sizes; returns the sample ids of all steps."""
    seen: list[list[int]] = []

    def watch(run):
        original = run.get_batch_samples

        def get_batch_samples(*args):
            batches, items = original(*args)
            seen.append([int(i) for batch in batches for i in batch["sample_id"]])
            return batches, items

        run.get_batch_samples = get_batch_samples

    run = tiny.trainer(tmp_path, (), tiny.llama(), save_strategy="steps", save_steps=1, **both, **first)
    watch(run)
    run.add_callback(At(stop_at, lambda: setattr(run.control, "should_training_stop", True)))
    run.train()
    del seen[stop_at:]
    again = tiny.trainer(tmp_path, (), tiny.llama(), **both, **then)
    watch(again)
    again.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{stop_at}"))
    return [i for step in seen for i in step], again


@pytest.mark.parametrize(
    "then",
    [
        {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2},
        {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4},
        {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4},  # the step boundary moves
        {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 1},
    ],
)
def test_resume_with_other_sizes_goes_on_after_the_same_samples(tmp_path, then):
    first = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1}
    order, again = resumed(tmp_path, first, then, 3, num_train_epochs=2, max_steps=-1)
    reference = tiny.trainer(tmp_path / "ref", (), tiny.llama(), num_train_epochs=2, max_steps=-1)
    loader = reference.get_train_dataloader()
    expected = []
    for epoch in range(2):
        loader.set_epoch(epoch)
        expected += [int(i) for batch in loader for i in batch["sample_id"]]
    assert order == expected
    assert again.state.epoch == pytest.approx(2.0)


def test_nothing_left_is_an_error(tmp_path):
    run = tiny.trainer(tmp_path, (), tiny.llama(), save_strategy="steps", save_steps=2, max_steps=4)
    run.train()
    again = tiny.trainer(tmp_path, (), tiny.llama(), max_steps=4)
    with pytest.raises(InputError, match="nothing is left"):
        again.train(resume_from_checkpoint=True)


def test_changed_schedule_asks_which_meaning(tmp_path):
    def rates(run):
        return [row["learning_rate"] for row in run.state.log_history if "learning_rate" in row]

    run = tiny.trainer(tmp_path, (), tiny.llama(), save_strategy="steps", save_steps=2, max_steps=4, warmup_steps=0)
    run.train()
    longer = {"max_steps": 8, "warmup_steps": 0}
    with pytest.raises(InputError, match=r"(?s)max_steps was 4, is 8.*schedule=continue.*schedule=extend"):
        tiny.trainer(tmp_path, (), tiny.llama(), **longer).train(str(tmp_path / "checkpoint-2"))
    kept = tiny.trainer(tmp_path, (), tiny.llama(), **longer)
    kept.guards.schedule = "continue"
    kept.train(str(tmp_path / "checkpoint-2"))
    assert rates(kept)[:4] == pytest.approx(rates(run))
    assert rates(kept)[5:] == pytest.approx([0, 0, 0])
    extended = tiny.trainer(tmp_path, (), tiny.llama(), **longer)
    extended.guards.schedule = "extend"
    extended.train(str(tmp_path / "checkpoint-2"))
    assert rates(extended)[2:] == pytest.approx([0.01 * (8 - step) / 8 for step in range(2, 8)])


def test_newest_broken_checkpoint_is_skipped_by_name(tmp_path, capsys):
    run = tiny.trainer(tmp_path, (), tiny.llama(), save_strategy="steps", save_steps=2)
    run.train()
    full = tiny.weights(run.model)
    weights = tmp_path / "checkpoint-6" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    (tmp_path / "checkpoint-4" / "scheduler.pt").unlink()
    again = tiny.trainer(tmp_path, (), tiny.llama())
    again.train(resume_from_checkpoint="auto")
    told = capsys.readouterr().out
    assert "skipped" in told
    assert "checkpoint-6" in told
    assert "scheduler.pt" in told
    assert f"resuming from {tmp_path / 'checkpoint-2'}" in told
    tiny.assert_same(full, tiny.weights(again.model))
    with pytest.raises(InputError, match="scheduler"):
        tiny.trainer(tmp_path, (), tiny.llama()).train(str(tmp_path / "checkpoint-4"))


def test_auto_starts_afresh_and_says_so(tmp_path, capsys):
    tiny.trainer(tmp_path, (), tiny.llama(), max_steps=1).train(resume_from_checkpoint="auto")
    assert "starting afresh" in capsys.readouterr().out
    with pytest.raises(InputError, match="no complete checkpoint"):
        tiny.trainer(tmp_path, (), tiny.llama(), max_steps=1).train(resume_from_checkpoint=True)


# --- signals ---


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGUSR1, 143)])
def test_signal_saves_at_the_next_boundary(tmp_path, signum, code):
    whole = tiny.trainer(tmp_path / "whole", (), tiny.llama(dropout=0.1))
    whole.train()
    run = tiny.trainer(tmp_path / "run", (), tiny.llama(dropout=0.1), save_strategy="steps", save_steps=100)
    run.add_callback(At(2, lambda: os.kill(os.getpid(), signum)))
    with pytest.raises(Interrupted) as ended:
        run.train()
    assert ended.value.exit_code == code
    assert ended.value.checkpoint.endswith("checkpoint-3")
    again = tiny.trainer(tmp_path / "run", (), tiny.llama(dropout=0.1))
    again.train(resume_from_checkpoint=True)
    tiny.assert_same(tiny.weights(whole.model), tiny.weights(again.model))


# --- the rest ---


def test_all_labels_masked_is_refused(tmp_path):
    samples = [{**sample, "labels": [-100] * len(sample["labels"])} for sample in tiny.text_samples()]
    with pytest.raises(InputError, match="no token takes part in the loss"):
        tiny.trainer(tmp_path, (), tiny.llama(), samples).train()


def test_best_checkpoint_survives_rotation_and_loads(tmp_path):
    run = tiny.trainer(
        tmp_path,
        [{"lawa": {"window": 2, "every": 1}}],
        tiny.llama(),
        max_steps=6,
        save_strategy="steps",
        save_steps=1,
        eval_strategy="steps",
        eval_steps=1,
        save_total_limit=1,
        load_best_model_at_end=True,
        metric_for_best_model="loss",
        learning_rate=0.3,
    )
    run.train()
    best = run.state.best_model_checkpoint
    assert os.path.isdir(best)
    assert ".tmp-" not in best
    assert run.evaluate()["eval_loss"] == pytest.approx(run.state.best_metric, rel=1e-5)


def test_guards_off_is_the_bare_parent(tmp_path):
    run = tiny.trainer(tmp_path, (), tiny.llama(), save_strategy="steps", save_steps=2)
    run.guards = Guards.off()
    spoil(run, 2)
    run.train()
    assert not (tmp_path / "checkpoint-2" / "thrifty_manifest.json").exists()
    assert any(torch.isnan(p).any() for p in run.model.parameters())

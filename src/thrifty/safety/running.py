"""Mixin: what is watched while the run goes on: numbers, signals, and the first step."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import TrainerCallback

from thrifty import _hf
from thrifty.safety.first_step import check_start, must_normalise
from thrifty.safety.memory import Rewind, SafeMemory
from thrifty.safety.numbers import FiniteGuard, NonFinite, SpikeDetector, read_together
from thrifty.safety.signals import Interrupted, SharedFlag, SignalGuard


class SafeRunning(SafeMemory):
    """The guards of the loop."""

    sample_ids: list[Any]
    finite: FiniteGuard | None = None
    spikes: SpikeDetector | None = None
    gradient_norm: Callable[[], torch.Tensor] | None = None
    """Gives the norm of a step's gradient where that is gone when the backward pass ends; a method may set it."""
    _grad_norm: torch.Tensor | float | None = None
    _left_out: frozenset[int] = frozenset()
    _unusable_loss: bool = False
    _interrupted_at: str | None = None
    _shared_flag: SharedFlag

    # --- numbers ---

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: torch.device) -> Any:
        batches, items = super().get_batch_samples(epoch_iterator, num_batches, device)
        self.sample_ids = [batch["sample_id"] for batch in batches if "sample_id" in batch]
        self._step_loss = None
        if self.batcher is not None:
            self.batcher.begin_step()
        return batches, items

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        self._grad_norm = super()._clip_grad_norm(model)
        return self._grad_norm

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        if self.gradient_norm is not None:
            grad_norm = self.gradient_norm()
        self._grad_norm = super()._get_grad_norm(model, grad_norm)
        return self._grad_norm

    def check_numbers(self) -> None:
        """Before the optimizer step: nothing that is not finite reaches the weights."""
        if self.finite is None:
            return
        step = self.state.global_step + 1
        loss, norm = read_together(self._step_loss, self._grad_norm)
        fine = math.isfinite(loss) and math.isfinite(norm)
        if step in self._left_out:
            self._drop_gradients()
            return
        verdict = self.finite.check(
            # On several processes each has a loss of its own; but a loss that is NaN makes the norm NaN on all of them.
            0.0 if self.args.world_size > 1 else loss,
            norm,
            step,
            self._ids_of_step(),
            None if fine else self._last_good(),
        )
        self._unusable_loss |= not math.isfinite(loss)
        if verdict.message:
            self.say(verdict.message)
        if verdict.action == "stop":
            raise NonFinite(verdict.message or "the numbers are not finite")
        if verdict.action == "rewind":
            self._left_out |= {step}
            raise Rewind(str(self._last_good()))
        if verdict.action == "skip":
            self._drop_gradients()
        elif self.spikes is not None and (line := self.spikes.check(loss, step, self._ids_of_step())):
            self.say(line)

    def _drop_gradients(self) -> None:
        # Without gradients an optimizer changes nothing. Under fp16 the scaler itself skips the step.
        if self.accelerator.scaler is None:
            self.model.zero_grad(set_to_none=True)

    def _ids_of_step(self) -> Any:
        return _Ids(self.sample_ids) if self.sample_ids else None

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        total, logged = self._total_loss_scalar, self._globalstep_last_logged
        super()._maybe_log_save_evaluate(*args, **kwargs)
        if self._unusable_loss and self._globalstep_last_logged != logged:
            # The row just logged shows the NaN that was met. The running sums must not carry it on for ever.
            self._tr_loss.zero_()
            before = max(logged - self._initial_global_step, 1)
            steps = self._globalstep_last_logged - logged
            self._total_loss_scalar = total + total / before * steps  # the final mean is that of the other rows
            self._unusable_loss = False

    # --- the loop ---

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        while True:
            try:
                return super()._inner_training_loop(*args, **kwargs)
            except Rewind as rewind:
                self.model = self.model_wrapped = _hf.unwrap(self.model_wrapped)
                self.optimizer = self.lr_scheduler = None
                self._load_from_checkpoint(rewind.checkpoint)
                kwargs["resume_from_checkpoint"] = rewind.checkpoint

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        checkpoint = self.find_checkpoint(resume_from_checkpoint)
        if self.args.save_strategy != "no":
            self._refuse_background_save()
            self._open_store()
        if self.guards.on_non_finite != "ignore":
            # The parent's own filter would log 0.0, or a mean of other steps, in place of a NaN.
            self.args.logging_nan_inf_filter = False
            self.finite = FiniteGuard(
                self.guards.on_non_finite,
                max_in_a_row=self.guards.max_non_finite_in_a_row,
                loss_scaling=self.accelerator.scaler is not None,
            )
        self.spikes = SpikeDetector() if self.guards.report_loss_spikes else None
        self.signals = SignalGuard()
        try:
            with self.signals if self.guards.handle_signals else contextlib.nullcontext():
                result = super().train(checkpoint, *args, **kwargs)
        finally:
            try:
                self.finish_saving()
            finally:
                if self.store is not None:
                    self.store.close()
                    self.store = None
        if self.signals.received is not None:
            saved = self._interrupted_at if self._interrupted_at and Path(self._interrupted_at).is_dir() else None
            raise Interrupted(self.signals.received, saved)  # that last save may have failed: then none is named
        return result

    def ready(self) -> None:
        """Model, optimizer and loader are prepared: look once before the first step."""
        if self.guards.on_oom == "split":
            self.batcher = self._make_batcher(self.model_wrapped)
        if self.guards.check_start:
            check_start(self)
            self._normalises = must_normalise(self)
        self.try_longest_batch()

    def step_boundary(self) -> None:
        """After each optimizer step: has somebody asked the run to end?"""
        self.look_after_saving()
        received = self.signals.received
        if self.args.world_size > 1 and self.guards.handle_signals:
            received = self._shared_flag.boundary(received)
            self.signals.received = received or self.signals.received
        if received is not None:
            self.control.should_save = True
            self.control.should_training_stop = True
            self._interrupted_at = str(Path(self.run_dir) / f"checkpoint-{self.state.global_step}")


class GuardEvents(TrainerCallback):
    """Calls the guards at the trainer's events."""

    def __init__(self, trainer: SafeRunning) -> None:
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if args.world_size > 1:
            group: Any = dist.new_group(backend="gloo")
            self.trainer._shared_flag = SharedFlag(group)
        self.trainer.ready()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer.check_numbers()
        if self.trainer.guards.on_oom == "split":
            self.trainer._guard_update()  # a method may have replaced the optimizer

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer.step_boundary()


class _Ids:
    """Sample ids of a step; they come from the device only when a message needs them."""

    def __init__(self, tensors: list[Any]) -> None:
        self.tensors = tensors

    def _all(self) -> list[int]:
        return [int(i) for tensor in self.tensors for i in torch.as_tensor(tensor).flatten().tolist()]

    def __len__(self) -> int:
        return len(self._all())

    def __iter__(self) -> Any:
        return iter(self._all())

    def __getitem__(self, index: Any) -> Any:
        return self._all()[index]

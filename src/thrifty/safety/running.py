"""Mixin: what is watched while the run goes on: memory, numbers, signals, and the first step."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import TrainerCallback

from thrifty import _hf
from thrifty.errors import InputError
from thrifty.safety.advice import advisor
from thrifty.safety.checkpointing import SafeCheckpoints
from thrifty.safety.first_step import check_start, longest_batch, must_normalise
from thrifty.safety.normalise import targets_of
from thrifty.safety.numbers import FiniteGuard, NonFinite, SpikeDetector, read_together
from thrifty.safety.oom import MicroBatcher, is_oom, release_memory
from thrifty.safety.signals import Interrupted, SharedFlag, SignalGuard
from thrifty.safety.trial import trial_step
from thrifty.safety.update import UpdateGuard


class Rewind(Exception):
    """Leaves the loop for the last good checkpoint."""

    def __init__(self, checkpoint: str) -> None:
        self.checkpoint = checkpoint


class SafeRunning(SafeCheckpoints):
    """The guards of the loop."""

    sample_ids: list[Any]
    batcher: MicroBatcher | None = None
    finite: FiniteGuard | None = None
    spikes: SpikeDetector | None = None
    gradient_norm: Callable[[], torch.Tensor] | None = None
    """Gives the norm of a step's gradient where that is gone when the backward pass ends; a method may set it."""
    _loss_share: float = 1.0
    _normalises: bool = False
    _step_loss: torch.Tensor | None = None
    _grad_norm: torch.Tensor | float | None = None
    _left_out: frozenset[int] = frozenset()
    _unusable_loss: bool = False
    _interrupted_at: str | None = None
    _went_back_at: int | None = None
    _forward_done: bool = False
    _entered: bool = False
    _inputs: Mapping[str, Any] = {}
    _shared_flag: SharedFlag

    # --- memory ---

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        if self.batcher is None:
            return self._count_loss(super().training_step(model, inputs, num_items_in_batch))
        if self.batcher.model is not model:  # a method has replaced it
            limits = self.batcher.state_dict()
            self.batcher = self._make_batcher(model)
            self.batcher.load_state_dict(limits)
            self.batcher.begin_step()
        self._inputs = inputs
        parent, batcher = super().training_step, self.batcher

        def forward_backward(piece: Mapping[str, Any], share: float) -> torch.Tensor:
            self._loss_share, self._forward_done = share, False
            try:
                with self._processes_in_step(model, batcher) as through:
                    return parent(through, dict(piece), num_items_in_batch)
            finally:
                self._loss_share = 1.0

        return self._count_loss(batcher.run(inputs, forward_backward))

    def _count_loss(self, loss: torch.Tensor) -> torch.Tensor:
        self._step_loss = loss if self._step_loss is None else self._step_loss + loss
        return loss

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        counts = self._normalises and num_items_in_batch is not None and not return_outputs
        targets = targets_of(inputs, self._loss_shifts_labels) if counts else None
        result: Any = super().compute_loss(model, inputs, return_outputs, num_items_in_batch=num_items_in_batch)
        self._forward_done = True
        if targets is not None:
            items: Any = num_items_in_batch
            return result * (targets / items)
        # A loss that was divided by the number of items of the whole step adds up over pieces; a mean does not.
        adds_up = (
            self.model_accepts_loss_kwargs and num_items_in_batch is not None
        ) or self.compute_loss_func is not None
        if self._loss_share == 1.0 or adds_up or return_outputs:
            return result
        return result * self._loss_share

    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> Any:
        inputs.pop("sample_id", None)
        if self.guards.on_oom == "raise":
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        if self.batcher is None:
            self.batcher = self._make_batcher(model)
        parent = super().prediction_step
        pieces = self.batcher.evaluate(
            inputs, lambda piece: parent(model, dict(piece), prediction_loss_only, ignore_keys)
        )
        if len(pieces) == 1:
            return pieces[0][1]
        losses = [share * loss for share, (loss, _, _) in pieces if loss is not None]
        loss = torch.stack(losses).sum() if losses else None
        logits = _join([logits for _, (_, logits, _) in pieces])
        labels = _join([labels for _, (_, _, labels) in pieces])
        return loss, logits, labels

    def _make_batcher(self, model: nn.Module) -> MicroBatcher:
        def cannot_recover() -> str | None:
            if self.args.world_size == 1:
                return None
            if not isinstance(model, DistributedDataParallel):
                return "the weights are spread over the processes, and the others wait for this one"
            begun = model.require_backward_grad_sync and self._forward_done and batcher.closing
            return "the exchange of gradients with the other processes had begun" if begun else None

        if isinstance(model, DistributedDataParallel):
            # Runs after DDP has exchanged the buffers, and before the model's own forward.
            model.module.register_forward_pre_hook(lambda module, inputs: self._note_entered())
        batcher = MicroBatcher(
            model, report=self.say_here, advise=advisor(model, self.args), cannot_recover=cannot_recover
        )
        return batcher

    def _note_entered(self) -> None:
        self._entered |= self.batcher is not None and self.batcher.closing

    @contextlib.contextmanager
    def _processes_in_step(self, model: nn.Module, batcher: MicroBatcher) -> Iterator[nn.Module]:
        """Yields what a piece of a micro-batch runs through, so that other processes see one pass a micro-batch.

        DDP exchanges buffers as a forward pass begins and gradients in a backward pass. The last piece does both; the
        others run through the bare model, whose gradients DDP takes along. A second attempt must not exchange again.
        """
        if not isinstance(model, DistributedDataParallel):
            yield model
        elif not batcher.closing:
            yield model.module
        else:
            if batcher.retrying and self._entered:
                model.require_forward_param_sync = False
            self._entered = False
            yield model

    def _prepare_inputs(self, inputs: Any) -> Any:
        inputs.pop("sample_id", None)
        return super()._prepare_inputs(inputs)

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
        if step in self._left_out:
            self._drop_gradients()
            return
        verdict = self.finite.check(
            # On several processes each has a loss of its own; but a loss that is NaN makes the norm NaN on all of them.
            0.0 if self.args.world_size > 1 else loss,
            norm,
            step,
            self._ids_of_step(),
            self._last_good(),
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

    def _last_good(self) -> Path | None:
        steps = self.store.steps() if self.store is not None else []
        return self.store.path(steps[-1]) if self.store is not None and steps else None

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
        if self.guards.trial_step and (batch := longest_batch(self)) is not None:
            self.accelerator.gradient_state._set_sync_gradients(True)
            items = self._get_num_items_in_batch([batch], self.args.device)
            self.current_gradient_accumulation_steps = 1
            optimizer: Any = self.optimizer

            def forward_backward(inputs: Mapping[str, Any]) -> None:
                if self.batcher is not None:
                    self.batcher.begin_step()
                model: Any = self.model_wrapped
                # Each process finds its own limit: nothing is exchanged that another one would have to wait for.
                alone = model.no_sync() if isinstance(model, DistributedDataParallel) else contextlib.nullcontext()
                with alone:
                    SafeRunning.training_step(self, model, dict(inputs), items)

            failure = self._try_trial(optimizer, batch, forward_backward)
            if failure is not None:
                self.say(f"out of memory in the optimizer step of the trial ({failure}): trying once more")
                failure = self._try_trial(optimizer, batch, forward_backward)
            if failure is not None:
                self._no_room_for_update(failure, batch)
            if self.batcher is not None:
                self.batcher.begin_step()
            self._step_loss = None

    def _try_trial(self, optimizer: Any, batch: Any, forward_backward: Any) -> str | None:
        """Runs the trial; what is left of an out-of-memory then is the optimizer's own, and its text comes back."""
        try:
            trial_step(self.model_wrapped, optimizer, batch, forward_backward)
        except Exception as error:
            if self.guards.on_oom == "raise" or not is_oom(error):
                raise
            failure = str(error).strip() or type(error).__name__
        else:
            return None
        release_memory()
        return failure.splitlines()[0]

    def _no_room_for_update(self, failure: str, inputs: Mapping[str, Any]) -> NoReturn:
        changes = advisor(self.model, self.args)(inputs, failure)
        raise InputError(
            f"out of memory in the optimizer step ({failure})",
            key="optim",
            value=str(self.args.optim),
            fix="; ".join(f"({i}) {line}" for i, line in enumerate(changes, 1)),
        )

    def _guard_update(self) -> None:
        """Puts the guard around the steps of accelerate's optimizer."""
        wrapped: Any = self.optimizer
        if getattr(wrapped, "_guarded", False):
            return
        guard = UpdateGuard(getattr(wrapped, "optimizer", wrapped), self.say)
        bare_step = wrapped.step

        def step(closure: None = None) -> None:
            failure = guard.run(bare_step)
            if failure is None:
                return
            checkpoint = self._last_good()
            if self.args.world_size > 1 or checkpoint is None or self._went_back_at == self.state.global_step:
                self._no_room_for_update(failure, self._inputs)
            self._went_back_at = self.state.global_step
            self.say(f"out of memory in the optimizer step, half done ({failure}): going back to {checkpoint}")
            raise Rewind(str(checkpoint))

        step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # `bare_step` tells the schedule
        wrapped.step, wrapped._guarded = step, True

    def step_boundary(self) -> None:
        """After each optimizer step: has somebody asked the run to end?"""
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


def _join(parts: list[Any]) -> Any:
    """Concatenates logits or labels of pieces: tensors, tuples of them, or None."""
    if parts[0] is None:
        return None
    if isinstance(parts[0], tuple | list):
        return type(parts[0])(_join(list(group)) for group in zip(*parts, strict=True))
    return torch.cat(parts)

"""Mixin: what is done when memory runs out: in forward and backward, in the optimizer's step, in evaluation."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from thrifty.errors import InputError
from thrifty.safety.advice import advisor
from thrifty.safety.checkpointing import SafeCheckpoints
from thrifty.safety.first_step import longest_batch
from thrifty.safety.normalise import targets_of
from thrifty.safety.oom import MicroBatcher, is_oom, release_memory, rng_snapshot
from thrifty.safety.trial import trial_step
from thrifty.safety.update import UpdateGuard


class Rewind(Exception):
    """Leaves the loop for the last good checkpoint."""

    def __init__(self, checkpoint: str) -> None:
        self.checkpoint = checkpoint


class SafeMemory(SafeCheckpoints):
    """Splits what does not fit, and goes on."""

    batcher: MicroBatcher | None = None
    _loss_share: float = 1.0
    _normalises: bool = False
    _step_loss: torch.Tensor | None = None
    _went_back_at: int | None = None
    _forward_done: bool = False
    _entered: bool = False
    _inputs: Mapping[str, Any] = {}

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

    def try_longest_batch(self) -> None:
        """One trial step on the longest batch, where lengths are known; nothing is changed but the size that fits."""
        batch = longest_batch(self) if self.guards.trial_step else None
        if batch is None:
            return
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
                SafeMemory.training_step(self, model, dict(inputs), items)

        failure = self._try_trial(optimizer, batch, forward_backward)
        if failure is not None:
            self.say(f"out of memory in the optimizer step of the trial ({failure}): trying once more")
            failure = self._try_trial(optimizer, batch, forward_backward)
        if failure is not None:
            self._no_room_for_update(failure, batch)
        self._forget_trial(batch, items)
        if self.batcher is not None:
            self.batcher.begin_step()
        self._step_loss = None

    def _forget_trial(self, batch: Mapping[str, Any], items: Any) -> None:
        """Clears what DDP remembers of the trial where it looks for unused parameters.

        It counts a parameter as used from any pass since the last exchange, and then wants its gradient, which a step
        that skips a block does not have. One exchange with a gradient for everybody clears that.
        """
        model: Any = self.model_wrapped
        if not isinstance(model, DistributedDataParallel) or not model.find_unused_parameters:
            return
        restore_rng = rng_snapshot()
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
        if self.batcher is not None:
            self.batcher.begin_step()
        SafeMemory.training_step(self, model, dict(batch), items)
        model.zero_grad(set_to_none=True)
        restore_rng()

    def _try_trial(self, optimizer: Any, batch: Any, forward_backward: Any) -> str | None:
        """Runs the trial; what is left of an out-of-memory then is the optimizer's own, and its text comes back."""
        try:
            wrapped: Any = self.model_wrapped
            trial_step(wrapped, optimizer, batch, forward_backward)
        except Exception as error:
            if self.guards.on_oom == "raise" or not is_oom(error):
                raise
            failure = str(error).strip() or type(error).__name__
        else:
            return None
        release_memory()
        return failure.splitlines()[0]

    def _no_room_for_update(self, failure: str, inputs: Mapping[str, Any]) -> NoReturn:
        model: Any = self.model
        changes = advisor(model, self.args)(inputs, failure)
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

    def _last_good(self) -> Path | None:
        self.finish_saving()
        steps = self.store.steps() if self.store is not None else []
        return self.store.path(steps[-1]) if self.store is not None and steps else None


def _join(parts: list[Any]) -> Any:
    """Concatenates logits or labels of pieces: tensors, tuples of them, or None."""
    if parts[0] is None:
        return None
    if isinstance(parts[0], tuple | list):
        return type(parts[0])(_join(list(group)) for group in zip(*parts, strict=True))
    return torch.cat(parts)

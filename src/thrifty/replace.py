"""Changing the model during the run: `trainer.replace_model(new, parameter_map)`, the one door.

A run is a sequence of segments. At a step boundary the model, the optimizer and the wrapper are rebuilt; the state of
every related parameter, the schedule, the scaler, the RNG and the data position are carried over; then the parent's
own epoch loop is entered again where it was left.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
import transformers
from torch import nn

from thrifty import _hf
from thrifty.stream import set_epoch

_IN_MEMORY = "<in memory>"  # stands for a checkpoint path where the parent asks for one


class ReplaceModel(transformers.Trainer):
    """Mixin: the door and the re-entry."""

    _leaving: bool = False  # a segment ends at this step
    _rng: dict[str, Any] | None = None

    def replace_model(self, new: nn.Module, parameter_map: Mapping[str, str | None]) -> None:
        """Replaces the model at a step boundary (from `on_step_end`).

        Args:
            new: The new model: another object, or the present one changed in place.
            parameter_map: For each parameter name of `new` (as `named_parameters` gives it) the old name whose
                optimizer state it inherits, or None for a fresh state. Names that are missing map to themselves where
                the old model had them with the same shape.
        """
        old_states = self._states_by_name()
        scheduler: Any = self.lr_scheduler
        scheduler_state = scheduler.state_dict()
        _hf.unwrap(new)
        _hf.forget_prepared(self.accelerator)
        self.model = self.model_wrapped = new.to(self.args.device)
        self.optimizer = None
        self.create_optimizer()
        self._carry_over(old_states, parameter_map)
        wrapped = self._wrap_model(self.model)
        wrapped, self.optimizer = self.accelerator.prepare(wrapped, self.optimizer)
        self._rebuild_schedule(scheduler_state)
        self._wrap_update()  # pyright: ignore[reportAttributeAccessIssue]
        self.model_wrapped = wrapped
        for attribute in ("model", "optimizer", "lr_scheduler"):
            setattr(self.callback_handler, attribute, getattr(self, attribute))
        recipe: Any = self.recipe  # pyright: ignore[reportAttributeAccessIssue]
        for method in recipe.using("on_replace"):
            method.on_replace(_hf.unwrap_container(self.model), parameter_map, self.ctx)  # pyright: ignore[reportAttributeAccessIssue]
        self._leaving = True
        self.control.should_epoch_stop = True

    def _states_by_name(self) -> dict[str, dict[str, Any]]:
        """Optimizer state by parameter name, with the parameter under the key `param`."""
        optimizer: Any = getattr(self.optimizer, "optimizer", self.optimizer)
        return {name: {"param": p, **optimizer.state.get(p, {})} for name, p in self._trained_names if p.requires_grad}

    def _remember_names(self) -> None:
        # A method may grow the model in place before it calls `replace_model`: then the old names are gone. So they are
        # noted when an optimizer is made.
        self._trained_names = list(self.model.named_parameters())

    def _carry_over(self, old: Mapping[str, dict[str, Any]], parameter_map: Mapping[str, str | None]) -> None:
        optimizer: Any = self.optimizer
        for name, p in self.model.named_parameters():
            source = parameter_map.get(name, name)
            if not p.requires_grad or source is None or source not in old:
                continue
            state = dict(old[source])
            shape = state.pop("param").shape
            if name not in parameter_map and shape != p.shape:
                continue
            if state:
                optimizer.state[p] = {k: v.clone() if torch.is_tensor(v) else v for k, v in state.items()}

    def _rebuild_schedule(self, saved: dict[str, Any]) -> None:
        self.lr_scheduler = None
        scheduler: Any = self.create_scheduler(num_training_steps=self.state.max_steps, optimizer=self.optimizer)
        optimizer: Any = self.optimizer
        groups = optimizer.param_groups
        per_group = {"base_lrs", "_last_lr", "lr_lambdas"}
        if len(saved.get("base_lrs", groups)) == len(groups):
            scheduler.load_state_dict(saved)
            rates = scheduler.get_last_lr()
        else:
            # Other groups than before: every group starts from its own base rate at the same place of the schedule.
            scheduler.load_state_dict({k: v for k, v in saved.items() if k not in per_group})
            rates = [f(scheduler.last_epoch) * b for f, b in zip(scheduler.lr_lambdas, scheduler.base_lrs, strict=True)]
            scheduler._last_lr = rates
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate

    # --- leaving and entering the parent's epoch loop ---

    def _run_epoch(self, **kw: Any) -> None:  # type: ignore[override]
        kw["model"] = self.model_wrapped
        set_epoch(kw["train_dataloader"], kw["epoch"])
        collator: Any = self.data_collator
        if hasattr(collator, "set_epoch"):
            collator.set_epoch(kw["epoch"])  # e.g. new masks in each epoch
        updates = kw["num_update_steps_per_epoch"]
        while True:
            with self._epoch_end_held_back():
                super()._run_epoch(**kw)
            if not self._between_segments():
                self._leaving = False
                return
            self._leaving = False
            self.control.should_epoch_stop = False
            done = self.state.global_step - kw["epoch"] * updates
            self._rng = _rng_state()
            kw.update(
                model=self.model_wrapped,
                resume_from_checkpoint=_IN_MEMORY,
                epochs_trained=kw["epoch"],
                steps_trained_in_current_epoch=done * self.args.gradient_accumulation_steps,
            )

    @contextlib.contextmanager
    def _epoch_end_held_back(self) -> Iterator[None]:
        """When a segment ends, the parent believes that the epoch ends. It does not: nobody may hear of it."""
        handler: Any = self.callback_handler
        original = handler.on_epoch_end

        def on_epoch_end(args: Any, state: Any, control: Any) -> Any:
            return control if self._between_segments() else original(args, state, control)

        handler.on_epoch_end = on_epoch_end
        try:
            yield
        finally:
            del handler.on_epoch_end

    def _between_segments(self) -> bool:
        return self._leaving and not self.control.should_training_stop and not self._epoch_is_over()

    def _epoch_is_over(self) -> bool:
        return self.state.global_step % self._updates_per_epoch == 0

    def set_initial_training_values(self, *args: Any, **kwargs: Any) -> Any:
        values = super().set_initial_training_values(*args, **kwargs)
        self._updates_per_epoch = values[1]
        return values

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        # Called once at the step that ended the segment (which must log, save and evaluate), and once more as if the
        # epoch were over (which must not).
        if self._between_segments():
            if self._segment_logged:
                self._segment_logged = False
                return
            self._segment_logged = True
        super()._maybe_log_save_evaluate(*args, **kwargs)

    _segment_logged: bool = False

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint == _IN_MEMORY:
            assert self._rng is not None
            _set_rng_state(self._rng)
            return
        super()._load_rng_state(checkpoint)


def _rng_state() -> dict[str, Any]:
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "cpu": torch.random.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.random.get_rng_state_all()
    return state


def _set_rng_state(state: Mapping[str, Any]) -> None:
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.random.set_rng_state(state["cpu"])
    if "cuda" in state:
        torch.cuda.random.set_rng_state_all(state["cuda"])

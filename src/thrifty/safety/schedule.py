"""The two meanings of going on with another schedule, made of `LambdaLR`, which every schedule of transformers is."""

from __future__ import annotations

from typing import Any

from torch.optim.lr_scheduler import LambdaLR

from thrifty.errors import InputError


def place_at(scheduler: Any, step: int) -> None:
    """Moves a schedule to `step` and sets the optimizer's learning rates, as if it had made `step` steps.

    Needed when the number of steps done changes its meaning, because the total batch did.

    Raises:
        InputError: It is not a function of the step (ReduceLROnPlateau).
    """
    inner = _lambda_lr(scheduler)
    inner.last_epoch, inner._step_count = step, step + 1
    rates = [base * function(step) for base, function in zip(inner.base_lrs, inner.lr_lambdas, strict=True)]
    for group, rate in zip(inner.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    inner._last_lr = rates


def hold_after(scheduler: Any, last_step: int) -> None:
    """Keeps the learning rate of `last_step` from there on: `schedule=continue` when the run outlasts the saved curve.

    Without it a cosine rises again beyond its end.

    Raises:
        InputError: It is not a function of the step.
    """
    inner = _lambda_lr(scheduler)
    inner.lr_lambdas = [_Held(function, last_step) for function in inner.lr_lambdas]


def scale_base_rates(scheduler: Any, factor: float) -> None:
    """Multiplies the base learning rates: `schedule=extend` with another `learning_rate`."""
    inner = _lambda_lr(scheduler)
    inner.base_lrs = [rate * factor for rate in inner.base_lrs]
    for group, rate in zip(inner.optimizer.param_groups, inner.base_lrs, strict=True):
        group["initial_lr"] = rate


class _Held:
    def __init__(self, function: Any, last_step: int) -> None:
        self._function, self._last_step = function, last_step

    def __call__(self, step: int) -> float:
        return self._function(min(step, self._last_step))


def _lambda_lr(scheduler: Any) -> LambdaLR:
    inner = getattr(scheduler, "scheduler", scheduler)  # accelerate wraps it
    if not isinstance(inner, LambdaLR):
        raise InputError(
            f"{type(inner).__name__} depends on the run so far and cannot be moved",
            key="lr_scheduler_type",
            fix="resume with the same batch size and length",
        )
    return inner

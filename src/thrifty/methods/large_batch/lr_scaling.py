"""Learning-rate scaling.

What it does: multiplies the learning rate for a batch that is k times the one it was tuned for: by k (linear) or by the
square root of k, rising from the old rate to the new one over the first steps.

Helps: going to larger batches (more devices, more accumulation) without tuning anew.
Does not help: beyond the batch size at which a step's gradient has little noise left: there larger steps only diverge.
Limits: linear is the rule of SGD, sqrt that of Adam and its kin. Betas and epsilon stay as they are. The batch is that
of `per_device_train_batch_size` x accumulation x processes.
Source: Goyal et al., "Accurate, Large Minibatch SGD", 2017; Krizhevsky, 2014; Malladi et al., 2022.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from thrifty.method import Method, NotApplicable, Paper, register

_NOT_A_FACTOR = ("reduce_lr_on_plateau", "greedy")  # their rate is no function of the step, so nothing can multiply it


def scale_factor(batch_size: int, base_batch_size: int, rule: str = "linear") -> float:
    """What the learning rate is multiplied by when the batch grows from `base_batch_size` to `batch_size`.

    >>> scale_factor(8192, 256), scale_factor(1024, 256, "sqrt"), scale_factor(256, 256)
    (32.0, 2.0, 1.0)
    """
    ratio = batch_size / base_batch_size
    return ratio**0.5 if rule == "sqrt" else ratio


def ramp(step: int, warmup_steps: int, factor: float) -> float:
    """The share of the scaled rate at a step: 1 / factor at the start, 1 from `warmup_steps` on, a line between.

    >>> [ramp(t, 4, 2.0) for t in (0, 2, 4, 9)]
    [0.5, 0.75, 1.0, 1.0]
    """
    if step >= warmup_steps:
        return 1.0
    return 1 / factor + (1 - 1 / factor) * step / warmup_steps


def add_ramp(scheduler: LambdaLR, warmup_steps: int, factor: float) -> None:
    """Lets the rates of a schedule rise from the unscaled to the scaled ones, for one's own loop.

    Args:
        scheduler: Of an optimizer whose groups have the scaled rate already.
        warmup_steps: Length of the ramp.
        factor: As from `scale_factor`.
    """
    scheduler.lr_lambdas = [_ramped(f, warmup_steps, factor) for f in scheduler.lr_lambdas]
    rates = [f(scheduler.last_epoch) * base for f, base in zip(scheduler.lr_lambdas, scheduler.base_lrs, strict=True)]
    for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    scheduler._last_lr = rates


def _ramped(rate: Any, warmup_steps: int, factor: float) -> Any:
    """A plain function, which a scheduler leaves out of its state; a ramp on a ramp is no more than one."""
    if getattr(rate, "has_ramp", False):
        return rate

    def ramped(step: int) -> float:
        return rate(step) * ramp(step, warmup_steps, factor)

    ramped.has_ramp = True  # type: ignore[attr-defined]
    return ramped


@register(
    "lr-scaling",
    title="Learning-rate scaling",
    section="large_batch",
    sources=[Paper("Goyal et al.", 2017, "arXiv:1706.02677"), Paper("Malladi et al.", 2022, "arXiv:2205.10287")],
    exact=False,
    preset={"base_batch_size": 1, "warmup_steps": 2},
)
@dataclass(kw_only=True)
class LrScaling(Method):
    """Scales the learning rate with the batch."""

    base_batch_size: int = 256
    """Samples a step for which `learning_rate` was tuned."""
    rule: Literal["linear", "sqrt"] = "linear"
    """linear for SGD, sqrt for Adam and its kin."""
    warmup_steps: float = 0.05
    """Steps (below 1: share of the run) over which the rate rises from the old to the new one; 0 starts at the new."""

    _ramp: int = field(default=0, init=False, repr=False)
    _factor: float = field(default=1.0, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.base_batch_size < 1:
            raise ValueError(f"base_batch_size must be at least 1, got {self.base_batch_size}")
        if self.warmup_steps < 0:
            raise ValueError(f"warmup_steps must not be negative, got {self.warmup_steps}")

    def configure(self, args: Any, ctx: Any) -> dict[str, Any]:
        kind = str(getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type))
        if self.warmup_steps and kind in _NOT_A_FACTOR:
            raise NotApplicable(
                "lr-scaling: this schedule is no function of the step, so the rate cannot be made to rise with it",
                key="lr_scheduler_type",
                value=kind,
                fix="use another schedule, or set methods.lr-scaling.warmup_steps to 0",
            )
        return {}

    def adjust_groups(self, groups: list[dict[str, Any]], ctx: Any) -> list[dict[str, Any]]:
        args = ctx.args
        batch_size = args.train_batch_size * args.gradient_accumulation_steps * ctx.world_size
        self._factor = scale_factor(batch_size, self.base_batch_size, self.rule)
        self._ramp = round(self.warmup_steps * ctx.total_steps if self.warmup_steps < 1 else self.warmup_steps)
        return [{**group, "lr": group.get("lr", args.learning_rate) * self._factor} for group in groups]

    def on_train_begin(self, args: Any, state: Any, control: Any, **kw: Any) -> None:
        self._add_ramp(kw.get("lr_scheduler"))

    def on_replace(self, model: nn.Module, parameter_map: Any, ctx: Any) -> None:
        self._add_ramp(ctx.trainer.lr_scheduler)

    def _add_ramp(self, scheduler: Any) -> None:
        if self._ramp and isinstance(scheduler, LambdaLR):
            add_ramp(scheduler, self._ramp, self._factor)

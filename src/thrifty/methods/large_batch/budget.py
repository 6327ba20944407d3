"""Training to a budget.

What it does: ends the run when a budget of minutes, FLOPs or tokens is used up, and lets the learning rate follow the
share of the budget that is used, so that it has fully decayed when the run ends.

Helps: comparing techniques at equal cost, and fixed slots of compute. A run that was killed and resumed spends no more
than one that was not: what earlier parts used is remembered.
Does not help: when the length of the run is known in steps.
Limits: `max_steps`, where it is set, is a second end, and the rate follows whichever is nearer. Other methods whose
schedule is a share of the run's steps need it. The run ends at the step nearest to the budget. With minutes the rate
depends on the clock, evaluation and checkpoints included, so that no two runs are equal to the bit.
Source: Kaddour et al., "No Train No Gain", 2023; Izsak et al., "How to Train BERT with an Academic Budget", 2021.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from thrifty.errors import InputError
from thrifty.method import Batch, Method, NotApplicable, Paper, TrainingData, register

UNBOUNDED = 10**8  # steps: what transformers is told where the user gave no end but the budget

# Sections whose methods plan by shares of the run's steps.
_SHARES_OF_THE_RUN = ("growth", "sparsity")


def rate_at(progress: float, warmup: float = 0.0, decay: str = "linear") -> float:
    """The share of the peak learning rate when `progress` of the budget is used.

    >>> [round(rate_at(p, 0.1), 3) for p in (0.0, 0.05, 0.1, 0.55, 1.0, 1.2)]
    [0.0, 0.5, 1.0, 0.5, 0.0, 0.0]
    """
    if progress >= 1:
        return 0.0
    if progress < warmup:
        return progress / warmup
    left = (1 - progress) / (1 - warmup)
    if decay == "cosine":
        return 0.5 * (1 - math.cos(math.pi * left))
    return min(1.0, left / 0.2) if decay == "wsd" else left


def step_flops(model: Any, inputs: Batch) -> float:
    """Operations of forward and backward for a batch: 6 x tokens (padding and patches too) x weights that are no
    embeddings."""
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    weights = sum(p.numel() for p in model.parameters() if id(p) not in embeddings)
    if "input_ids" in inputs:
        return 6.0 * weights * inputs["input_ids"].numel()
    batch, _, height, width = inputs["pixel_values"].shape
    patch = getattr(model.config, "patch_size", 16)
    rows, columns = (patch, patch) if isinstance(patch, int) else patch
    return 6.0 * weights * batch * (height // rows) * (width // columns)


class Meter:
    """How much of a budget is used, and whether another step would bring the run nearer to it.

    Args:
        total: The budget in any unit.
        used: What earlier parts of the run used.
    """

    def __init__(self, total: float, used: float = 0.0) -> None:
        self.total, self.used = total, used
        self.step_cost: float | None = None  # running estimate

    def spend(self, amount: float) -> None:
        """Counts one step."""
        self.used += amount
        # The first steps are slow (compilation, caches): an even mean would take long to forget them.
        self.step_cost = amount if self.step_cost is None else 0.7 * self.step_cost + 0.3 * amount

    @property
    def progress(self) -> float:
        """The used share."""
        return self.used / self.total

    @property
    def is_over(self) -> bool:
        """Would one more step end farther from the budget than the run is now?"""
        return self.used + (self.step_cost or 0.0) / 2 >= self.total


@register(
    "budget",
    title="Training to a budget",
    section="large_batch",
    sources=[Paper("Kaddour et al.", 2023, "arXiv:2307.06440"), Paper("Izsak et al.", 2021, "arXiv:2104.07705")],
    exact=False,
    claims=("schedule",),
    preset={"tokens": 300, "warmup": 0.1, "decay": "cosine"},
)
@dataclass(kw_only=True)
class Budget(Method):
    """Ends the run at a budget, with the learning rate fully decayed. Give one of minutes, flops and tokens."""

    minutes: float | None = None
    """Wall-clock time of all parts of the run together."""
    flops: float | None = None
    """Floating-point operations, counted as 6 x tokens x weights that are no embeddings."""
    tokens: float | None = None
    """Tokens without padding, on all processes together."""
    warmup: float = 0.02
    """Share of the budget over which the rate rises from 0."""
    decay: Literal["linear", "cosine", "wsd"] = "linear"
    """How the rate falls after that; wsd stays until the last fifth."""

    meter: Meter = field(init=False, repr=False)
    clock: Callable[[], float] = field(default=time.monotonic, init=False, repr=False)
    _bound: int = field(default=0, init=False, repr=False)
    _amount: Any = field(default=0.0, init=False, repr=False)
    _since: float | None = field(default=None, init=False, repr=False)
    _step: int = field(default=0, init=False, repr=False)
    ctx: Any = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        given = {k: getattr(self, k) for k in ("minutes", "flops", "tokens") if getattr(self, k) is not None}
        if len(given) > 1:
            raise ValueError(f"minutes, flops and tokens are three ways to give one budget, got {given}")
        for key, value in given.items():
            if not value > 0:
                raise ValueError(f"{key} must be above 0, got {value}")
        if not 0 <= self.warmup < 1:
            raise ValueError(f"warmup must be at least 0 and below 1, got {self.warmup}")
        self.meter = Meter(next(iter(given.values()), math.inf))

    @property
    def unit(self) -> str:
        """What the budget is given in."""
        return "minutes" if self.minutes else "flops" if self.flops else "tokens"

    def configure(self, args: Any, ctx: Any) -> dict[str, Any]:
        self.ctx = ctx
        if math.isinf(self.meter.total):
            raise NotApplicable("budget: none is given", key="methods.budget", fix="set minutes, flops or tokens")
        if args.max_steps > 0:
            self._bound = args.max_steps
            return {}
        recipe = () if ctx.trainer is None else ctx.trainer.recipe
        planning_by_shares = [m.name for m in recipe if m.spec.section in _SHARES_OF_THE_RUN]
        if planning_by_shares and not ctx.planning:
            raise NotApplicable(
                f"budget: {', '.join(planning_by_shares)} acts at shares of the run's steps, which a budget does not "
                "tell",
                key="max_steps",
                value=args.max_steps,
                fix="set max_steps to about the steps that the budget pays for; the run ends at whichever comes first",
            )
        return {} if ctx.planning else {"max_steps": UNBOUNDED}

    def prepare_data(self, data: TrainingData, ctx: Any) -> TrainingData:
        if self.unit == "tokens" and len(data.train_dataset) and "input_ids" not in data.train_dataset[0]:
            raise NotApplicable(
                "budget: the samples have no input_ids, so there are no tokens to count",
                key="methods.budget.tokens",
                value=self.tokens,
                fix="give minutes or flops",
            )
        return data

    def progress(self) -> float:
        """The used share of the budget, or of max_steps where that is nearer to its end."""
        return max(self.meter.progress, self._step / self._bound if self._bound else 0.0)

    def build_schedule(self, optimizer: torch.optim.Optimizer, total_steps: int, ctx: Any) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: rate_at(self.progress(), self.warmup, self.decay)
        )

    def wrap_training_step(self, step: Callable[..., Any], ctx: Any) -> Callable[..., Any]:
        if self.unit == "minutes":
            return step

        def counted(model: Any, inputs: Batch, num_items_in_batch: Any = None) -> Any:
            self._amount = self._amount + self._cost(inputs)
            return step(model, inputs, num_items_in_batch)

        return counted

    def _cost(self, inputs: Batch) -> Any:
        if self.unit == "flops":
            return step_flops(self.ctx.model, inputs)
        mask = inputs.get("attention_mask")
        return mask.sum() if mask is not None and mask.dim() == 2 else inputs["input_ids"].numel()

    def wrap_update(self, update: Callable[[], None], ctx: Any) -> Callable[[], None]:
        def spent() -> None:
            update()
            # Before the schedule moves, which asks for the progress.
            self.meter.spend(self._spent_in_step(ctx))
            self._step = ctx.step + 1

        return spent

    def _spent_in_step(self, ctx: Any) -> float:
        if self.unit == "minutes":
            now = self.clock()
            amount = (now - (self._since if self._since is not None else now)) / 60
            self._since = now
        else:
            amount, self._amount = float(self._amount), 0.0
        if ctx.world_size == 1:
            return amount
        # All processes must have the same rate, and end at the same step.
        total = torch.tensor(amount, dtype=torch.float64, device="cpu" if ctx.device.type == "mps" else ctx.device)
        dist.all_reduce(total, op=dist.ReduceOp.MAX if self.unit == "minutes" else dist.ReduceOp.SUM)
        return float(total)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kw: Any) -> None:
        self._step, self._since = state.global_step, self.clock()
        if not self.ctx.planning and self.meter.is_over:
            raise InputError(
                f"the {self.unit} are used up ({self.meter.used:.4g} of {self.meter.total:.4g})",
                key=f"methods.budget.{self.unit}",
                value=self.meter.total,
                fix="give more to go on",
            )

    def on_step_end(self, args: Any, state: Any, control: Any, **kw: Any) -> None:
        if not self.meter.is_over:
            return
        control.should_training_stop = control.should_log = True
        # What transformers does at max_steps.
        if _value(args.save_strategy) == "steps":
            control.should_save = True
        if _value(args.eval_strategy) == "steps":
            control.should_evaluate = True

    def state_dict(self) -> dict[str, Any]:
        used = self.meter.used
        if self.unit == "minutes" and self._since is not None:
            used += (self.clock() - self._since) / 60  # since the last step: evaluation, other checkpoints
        return {"used": used, "step_cost": self.meter.step_cost, "unit": self.unit}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["unit"] != self.unit:
            raise InputError(
                f"the checkpoint counted {state['unit']}", key="methods.budget", value=self.unit, fix="keep the unit"
            )
        # Going back to an earlier checkpoint brings tokens back, but no time.
        spent = self.meter.used if self.unit == "minutes" else 0.0
        self.meter.used, self.meter.step_cost = max(state["used"], spent), state["step_cost"]


def _value(setting: Any) -> str:
    return str(getattr(setting, "value", setting))

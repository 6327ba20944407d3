"""Schedule-Free AdamW.

What it does: trains at a point between fast iterates and their running average, and evaluates and saves the average.
There is no learning-rate schedule, so a run can be stopped at any time.

Helps: when the length of the run is not known.
Does not help: against a well-tuned schedule that decays to zero over a known length.
Limits: warm-up is advised; the learning rate wants to be 1 to 10 times that of AdamW. Models with BatchNorm need new
    statistics.
Source: Defazio et al., "The Road Less Scheduled", 2024.
Library: schedulefree.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from thrifty.method import Method, NotApplicable, Paper, register
from thrifty.methods.optimizers._groups import clean


@contextlib.contextmanager
def averaged(optimizer: Any) -> Iterator[None]:
    """Inside, the weights are the averaged ones; afterwards again those that are trained, bit for bit."""
    if not optimizer.param_groups[0].get("train_mode", False):
        yield
        return
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    own = [p.detach().clone() for p in parameters]
    optimizer.eval()
    try:
        yield
    finally:
        # Going there and back by arithmetic would lose the last bits, and with them an exact resume.
        optimizer.train()
        with torch.no_grad():
            for p, value in zip(parameters, own, strict=True):
                p.copy_(value)


@register(
    "schedule-free",
    title="Schedule-Free AdamW",
    section="optimizers",
    sources=[Paper("Defazio et al.", 2024, "arXiv:2405.15682")],
    exact=False,
    claims=("optimizer", "schedule", "average"),
    library="schedulefree",
    # The average has to be taken before anything folds, merges or masks the weights.
    runs_before=("section:initialization", "section:sparsity", "section:overparameterization", "section:peft"),
    bench_order=64,
)
@dataclass(kw_only=True)
class ScheduleFree(Method):
    """AdamW without a schedule. The learning rate and the warm-up steps are those of the run."""

    beta: float = 0.9
    """Where between the average (1) and the iterate (0) gradients are taken."""

    _optimizer: Any = field(default=None, init=False, repr=False)

    def prepare_model(self, model: nn.Module, ctx: Any) -> nn.Module:
        if any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules()):
            raise NotApplicable(
                f"schedule-free: {type(model).__name__} has BatchNorm, whose statistics would be of other weights",
                fix="use adamw",
            )
        return model

    def build_optimizer(self, groups: list[dict[str, Any]], ctx: Any) -> torch.optim.Optimizer:
        from schedulefree import AdamWScheduleFree

        self._optimizer = AdamWScheduleFree(
            clean(groups),
            lr=ctx.args.learning_rate,
            betas=(self.beta, ctx.args.adam_beta2),
            eps=ctx.args.adam_epsilon,
            warmup_steps=ctx.args.get_warmup_steps(ctx.total_steps),
        )
        self._optimizer.train()
        return self._optimizer

    def build_schedule(self, optimizer: torch.optim.Optimizer, total_steps: int, ctx: Any) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, _constant)

    @contextlib.contextmanager
    def evaluating(self, model: nn.Module) -> Iterator[None]:
        if self._optimizer is None:
            yield
            return
        with averaged(self._optimizer):
            yield

    def finish(self, model: nn.Module, ctx: Any) -> nn.Module:
        if self._optimizer is not None:
            self._optimizer.eval()
        return model


def _constant(step: int) -> float:
    return 1.0

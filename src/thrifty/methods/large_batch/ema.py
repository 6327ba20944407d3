"""Exponential moving average of the weights (EMA).

What it does: keeps a running mean of the trained weights, updated after every optimizer step, and evaluates and saves
it in place of the last weights. Training itself is untouched.

Helps: noisy training with a high learning rate or small batches.
Does not help: at the end of a fully decayed schedule, where the last weights are as good.
Costs: one copy of the trained weights.
Limits: when another method changes the model in mid-run, the mean starts anew from the changed weights.
Source: Polyak and Juditsky, "Acceleration of Stochastic Approximation by Averaging", 1992; Tarvainen and Valpola, 2017.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from thrifty.method import Method, Paper, register
from thrifty.methods.large_batch._swap import swapped


class MovingAverage:
    """The running mean of a model's trained weights, in float32.

    Args:
        decay: Share of the old mean that stays at each update.
        warm_up: Start with smaller decays, min(decay, (1 + t) / (10 + t)), so that the first weights are soon
            forgotten.
    """

    def __init__(self, decay: float = 0.999, warm_up: bool = True) -> None:
        self.decay, self.warm_up = decay, warm_up
        self.mean: dict[str, Tensor] = {}
        self.updates = 0

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """Takes the present weights into the mean."""
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        if self.mean.keys() != trained.keys():
            self.mean = {name: p.detach().float().clone() for name, p in trained.items()}
            self.updates = 0
            return
        self.updates += 1
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates)) if self.warm_up else self.decay
        for name, p in trained.items():
            self.mean[name] = self.mean[name].to(p.device).lerp_(p.detach().float(), 1 - decay)

    @torch.no_grad()
    def copy_to(self, model: nn.Module) -> None:
        """Writes the mean into the model."""
        for name, p in model.named_parameters():
            if name in self.mean:
                p.copy_(self.mean[name])

    @contextlib.contextmanager
    def applied(self, model: nn.Module) -> Iterator[None]:
        """Inside, the model holds the mean; afterwards its own weights again, bit for bit."""
        with swapped(model, self.copy_to):
            yield


@register(
    "ema",
    title="Exponential moving average",
    section="large_batch",
    sources=[
        Paper("Polyak and Juditsky", 1992, "SIAM J. Control Optim. 30(4)"),
        Paper("Tarvainen and Valpola", 2017, "arXiv:1703.01780"),
    ],
    exact=True,
    claims=("average",),
    # The mean has to be taken before anything folds, merges or masks the weights.
    runs_before=("section:initialization", "section:sparsity", "section:overparameterization", "section:peft"),
)
@dataclass(kw_only=True)
class Ema(Method):
    """Evaluates and saves a moving average of the weights."""

    decay: float = 0.999
    """Share of the old mean that stays at each update."""
    warm_up: bool = True
    """Start with smaller decays."""

    average: MovingAverage = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not 0 <= self.decay < 1:
            raise ValueError(f"decay must be at least 0 and below 1, got {self.decay}")
        self.average = MovingAverage(self.decay, self.warm_up)

    def held_bytes(self, trainable: int, itemsize: float, device: str) -> int:
        return 4 * trainable  # the mean, in float32

    def on_step_end(self, args: Any, state: Any, control: Any, **kw: Any) -> None:
        self.average.update(kw["model"])

    def on_replace(self, model: nn.Module, parameter_map: Any, ctx: Any) -> None:
        self.average.mean = {}

    @contextlib.contextmanager
    def evaluating(self, model: nn.Module) -> Iterator[None]:
        with self.average.applied(model):
            yield

    def finish(self, model: nn.Module, ctx: Any) -> nn.Module:
        self.average.copy_to(model)
        return model

    def state_dict(self) -> dict[str, Any]:
        return {
            "mean": {name: value.cpu() for name, value in self.average.mean.items()},
            "updates": self.average.updates,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.average.mean, self.average.updates = dict(state["mean"]), state["updates"]

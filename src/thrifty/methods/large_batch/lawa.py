"""Latest weight averaging (LAWA).

What it does: keeps the last `window` snapshots of the trained weights, one every `every` optimizer steps, and
evaluates and saves their mean. Training itself is untouched.

Helps: while the learning rate is still high, so also for a run that may be stopped at any time.
Does not help: at the end of a fully decayed schedule the gain mostly vanishes (Kaddour et al., 2023).
Costs: `window` copies of the trained weights in host memory.
Limits: when another method changes the model in mid-run, the window starts anew.
Source: Kaddour, "Stop Wasting My Time! Saving Days of ImageNet and BERT Training with Latest Weight Averaging", 2022.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from thrifty.method import Method, NotApplicable, Paper, register
from thrifty.methods.large_batch._swap import swapped


class LatestWeightAverage:
    """Mean of the most recent snapshots of a model's trainable weights.

    Args:
        window: How many snapshots are kept; the oldest goes first.
    """

    def __init__(self, window: int) -> None:
        if window < 1:
            raise ValueError(f"window must be at least 1, got {window}")
        self.snapshots: deque[dict[str, Tensor]] = deque(maxlen=window)

    @torch.no_grad()
    def push(self, model: nn.Module) -> None:
        """Takes a snapshot. Clones: on a CPU `.cpu()` alone would alias the live weights."""
        self.snapshots.append({n: p.detach().cpu().clone() for n, p in model.named_parameters() if p.requires_grad})

    @torch.no_grad()
    def copy_to(self, model: nn.Module) -> None:
        """Writes the mean into `model`; leaves parameters that were never trained alone."""
        if not self.snapshots:
            return
        for name, p in model.named_parameters():
            if name in self.snapshots[-1]:
                p.copy_(torch.stack([s[name].float() for s in self.snapshots]).mean(0))

    @contextlib.contextmanager
    def applied(self, model: nn.Module) -> Iterator[None]:
        """Inside, the model holds the mean; afterwards its own weights again, bit for bit."""
        with swapped(model, self.copy_to):
            yield


@register(
    "lawa",
    title="Latest weight averaging",
    section="large_batch",
    sources=[Paper("Kaddour", 2022, "arXiv:2209.14981")],
    exact=True,
    preset={"window": 2, "every": 1},
    claims=("average",),
    # The mean has to be taken before anything folds, merges or masks the weights.
    runs_before=("section:initialization", "section:sparsity", "section:overparameterization", "section:peft"),
    bench_order=76,
)
@dataclass(kw_only=True)
class Lawa(Method):
    """Averages the latest weights, evaluates and saves the mean."""

    window: int = 10
    """Number of snapshots that are averaged."""
    every: int = 1000
    """Optimizer steps between two snapshots."""

    average: LatestWeightAverage = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ValueError(f"every must be at least 1, got {self.every}")
        self.average = LatestWeightAverage(self.window)

    def prepare_model(self, model: nn.Module, ctx: Any) -> nn.Module:
        if not ctx.planning and self.every > ctx.total_steps:
            raise NotApplicable(
                f"lawa: the run has {ctx.total_steps} steps, so no snapshot would ever be taken",
                key="methods.lawa.every",
                value=self.every,
                fix=f"set every below {ctx.total_steps}",
            )
        return model

    def held_bytes(self, trainable: int, itemsize: float, device: str) -> int:
        return round(self.window * trainable * itemsize) if device == "cpu" else 0  # snapshots lie on the host

    def on_step_end(self, args: Any, state: Any, control: Any, **kw: Any) -> None:
        if state.global_step % self.every == 0:
            self.average.push(kw["model"])

    def on_replace(self, model: nn.Module, parameter_map: Any, ctx: Any) -> None:
        self.average.snapshots.clear()

    @contextlib.contextmanager
    def evaluating(self, model: nn.Module) -> Iterator[None]:
        with self.average.applied(model):
            yield

    def finish(self, model: nn.Module, ctx: Any) -> nn.Module:
        self.average.copy_to(model)
        return model

    def state_dict(self) -> dict[str, Any]:
        return {"snapshots": list(self.average.snapshots)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.average.snapshots = deque(state["snapshots"], maxlen=self.window)

"""GraNd data pruning.

What it does: scores each sample by the norm of its own gradient, of models early in training, and trains on the samples
with the largest ones only.

Helps: as EL2N, which approximates it; the gradient also sees the features, not the error alone.
Does not help: at initialisation (steps: 0) a reproduction found it no better than chance; small or noisy data.
Limits: one backward pass a sample for each early model, several times the cost of EL2N. All samples are scored in eval
mode, by their id.
Source: Paul, Ganguli and Dziugaite, "Deep Learning on a Data Diet", NeurIPS 2021; Kirsch, "Does 'Deep Learning on a
Data Diet' reproduce?", 2023.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from thrifty.method import Batch, Paper, register
from thrifty.methods.selection._scoring import ScorePruning, batches_of, early_model, early_steps, task_of


def gradient_norms(task: Any, model: nn.Module, batch: Batch, only: str = "") -> Tensor:
    """The norm of each sample's gradient, shape (batch,).

    Args:
        task: One of `thrifty.tasks`.
        model: In eval mode, or dropout takes part.
        batch: A collated batch; its samples are run one at a time.
        only: Restricts the gradient to parameters whose name contains this.
    """
    chosen = [p for name, p in model.named_parameters() if p.requires_grad and only in name]
    norms = []
    count = len(next(value for value in batch.values() if isinstance(value, Tensor)))
    for row in range(count):
        with torch.enable_grad():
            loss = task.per_sample_loss(model, _row(batch, row, count)).sum()
            gradients = torch.autograd.grad(loss, chosen, allow_unused=True)
        norms.append(torch.stack([g.float().norm() for g in gradients if g is not None]).norm())
    return torch.stack(norms)


def _row(batch: Mapping[str, Any], row: int, count: int) -> Batch:
    return {
        key: value[row : row + 1] if isinstance(value, Tensor) and value.dim() and len(value) == count else value
        for key, value in batch.items()
    }


@register(
    "grand",
    title="GraNd data pruning",
    section="selection",
    sources=[Paper("Paul, Ganguli and Dziugaite", 2021, "arXiv:2107.07075"), Paper("Kirsch", 2023, "arXiv:2303.14753")],
    exact=False,
    claims=("pruning",),
    preset={"steps": 2, "runs": 1},
)
@dataclass(kw_only=True)
class GraNd(ScorePruning):
    """Keeps the samples with large gradients early in training."""

    steps: int | None = None
    """Optimizer steps of the early models; None is a tenth of the run."""
    runs: int = 3
    """Early models whose scores are averaged; the paper takes 10."""
    only: str = ""
    """Restricts the gradient to parameters whose name contains this, for example the head."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.steps is not None and self.steps < 0:
            raise ValueError(f"steps must not be negative, got {self.steps}")
        if self.runs < 1:
            raise ValueError(f"runs must be at least 1, got {self.runs}")

    def scoring(self, ctx: Any) -> dict[str, Any]:
        return {"steps": early_steps(ctx, self.steps), "runs": self.runs, "only": self.only}

    def compute(self, dataset: Any, ctx: Any) -> np.ndarray[Any, Any]:
        steps = early_steps(ctx, self.steps)
        total = np.zeros(len(dataset))
        for run in range(self.runs):
            model = early_model(ctx, self.name, run, steps, dataset, ctx.model)
            task = task_of(ctx, model)
            size = ctx.args.per_device_eval_batch_size
            parts = [gradient_norms(task, model, b, self.only) for b in batches_of(ctx, model, dataset, size)]
            total += torch.cat(parts).double().cpu().numpy() / self.runs
        return total

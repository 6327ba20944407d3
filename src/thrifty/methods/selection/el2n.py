"""EL2N data pruning.

What it does: scores each sample by the length of the error vector, softmax of the prediction minus the true class,
of models early in training, and trains on the samples with the largest ones only.

Helps: large clean data sets with many easy samples: half of CIFAR-10 could go without loss.
Does not help: small data; data with wrong labels, which float to the top (skip_hardest leaves those out).
Limits: scores from one early run are noisy: the paper averages ten, and each costs `steps` of training. For language
models the score is the mean over the tokens. All samples are scored in eval mode, by their id.
Source: Paul, Ganguli and Dziugaite, "Deep Learning on a Data Diet", NeurIPS 2021.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from thrifty.method import Batch, Paper, register
from thrifty.methods.selection._scoring import (
    LABELLED,
    ScorePruning,
    batches_of,
    early_model,
    early_steps,
    logit_gradients,
    task_of,
)


def el2n(task: Any, model: nn.Module, batch: Batch) -> Tensor:
    """The EL2N score of each sample, shape (batch,): the mean over its targets of |softmax - one-hot|.

    Args:
        task: One of `thrifty.tasks` whose model has logits and labels.
        model: In eval mode, or dropout takes part.
        batch: A collated batch.
    """
    gradient, sizes = logit_gradients(task, model, batch)
    norms = gradient.norm(dim=-1)
    return norms if norms.dim() == 1 else norms.sum(1) / sizes.clamp(min=1)


def without_hardest(values: np.ndarray[Any, Any], count: int, skip: float) -> np.ndarray[Any, Any]:
    """Places of the `count` largest values, a share `skip` of all left out at the top (as far as enough remain)."""
    order = np.argsort(-values, kind="stable")
    first = min(round(skip * len(values)), len(values) - count)
    return order[first : first + count]


@register(
    "el2n",
    title="EL2N data pruning",
    section="selection",
    sources=[Paper("Paul, Ganguli and Dziugaite", 2021, "arXiv:2107.07075")],
    exact=False,
    claims=("pruning",),
    tasks=LABELLED,
    preset={"steps": 2, "runs": 1},
)
@dataclass(kw_only=True)
class El2n(ScorePruning):
    """Keeps the samples with large errors early in training."""

    steps: int | None = None
    """Optimizer steps of the early models; None is a tenth of the run."""
    runs: int = 3
    """Early models whose scores are averaged; the paper takes 10."""
    skip_hardest: float = 0.0
    """Share of the samples, those with the largest scores, that is left out as noise."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.steps is not None and self.steps < 0:
            raise ValueError(f"steps must not be negative, got {self.steps}")
        if self.runs < 1:
            raise ValueError(f"runs must be at least 1, got {self.runs}")
        if not 0 <= self.skip_hardest < 1:
            raise ValueError(f"skip_hardest must be at least 0 and below 1, got {self.skip_hardest}")

    def scoring(self, ctx: Any) -> dict[str, Any]:
        return {"steps": early_steps(ctx, self.steps), "runs": self.runs}

    def compute(self, dataset: Any, ctx: Any) -> np.ndarray[Any, Any]:
        steps = early_steps(ctx, self.steps)
        total = np.zeros(len(dataset))
        for run in range(self.runs):
            model = early_model(ctx, self.name, run, steps, dataset, ctx.model)
            task = task_of(ctx, model)
            size = ctx.args.per_device_eval_batch_size
            parts = [self.score(task, model, batch) for batch in batches_of(ctx, model, dataset, size)]
            total += torch.cat(parts).double().cpu().numpy() / self.runs
        return total

    def score(self, task: Any, model: nn.Module, batch: Batch) -> Tensor:
        """The score of each sample of a batch."""
        return el2n(task, model, batch)

    def choose(self, values: np.ndarray[Any, Any], count: int) -> np.ndarray[Any, Any]:
        return without_hardest(values, count, self.skip_hardest)

"""Importance sampling.

What it does: draws a few times the samples a step needs, scores each by the norm of the loss's gradient at the logits,
and trains on samples drawn in proportion to it, weighted so that the expected gradient stays that of plain training.
It switches itself on when the scores differ enough for that to pay.

Helps: long training in which most samples have become easy: the gradient of a step varies less for its cost.
Does not help: the beginning of training, where all samples matter alike (it stays off), and small batches of a model
whose forward pass is most of the cost.
Limits: models with logits and labels. One forward pass over the drawn samples a step, when on. Each process draws among
its own share. Scores are taken in eval mode; a sample counts by its number of targets, as in plain training.
Source: Katharopoulos and Fleuret, "Not All Samples Are Created Equal: Deep Learning with Importance Sampling", ICML
2018.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from thrifty.method import Batch, Method, Paper, register
from thrifty.methods.selection._presample import draw_rows, joined, watched
from thrifty.methods.selection._scoring import LABELLED, logit_gradients, sizes_of, task_of

_WEIGHT = "sample_weight"


def probabilities(scores: Tensor) -> Tensor:
    """Sampling probabilities in proportion to the scores, float64 of shape (n,); uniform where all are zero."""
    scores = scores.double()
    total = scores.sum()
    return scores / total if float(total) > 0 else torch.full_like(scores, 1 / len(scores))


def variance_ratio(chances: Tensor) -> float:
    """tau: how many times more uniform samples would reduce the variance of the gradient as much; 1 for equal scores.

    1 / tau^2 = 1 - |g - u|^2 / |g|^2 = 1 / (n * sum g^2), for chances g of n samples and uniform ones u.

    >>> variance_ratio(torch.full((4,), 0.25))
    1.0
    """
    return float((len(chances) * chances.double().square().sum()).sqrt())


def draw_weighted(chances: Tensor, count: int, rng: torch.Generator) -> tuple[Tensor, Tensor]:
    """Places of `count` samples, drawn with replacement, and their weights 1 / (n g).

    The mean of weight times gradient over the drawn ones has the plain mean over all n as its expectation.
    """
    places = torch.multinomial(chances, count, replacement=True, generator=rng)
    return places, 1 / (len(chances) * chances[places])


@register(
    "importance-sampling",
    title="Importance sampling",
    section="selection",
    sources=[Paper("Katharopoulos and Fleuret", 2018, "arXiv:1803.00942")],
    exact=False,
    claims=("draw", "loss"),
    conflicts_with={
        "mass": "its loss is that of a shortened pass, which this method's weighted loss does not run",
        "token-dropping": "its loss is that of a shortened pass, which this method's weighted loss does not run",
    },
    # Each process draws among its own share of the data.
    processes=False,
    tasks=LABELLED,
    preset={"threshold": 0.0},
)
@dataclass(kw_only=True)
class ImportanceSampling(Method):
    """Trains on samples drawn by the size of their gradients."""

    presample: float = 3.0
    """Samples that are drawn and scored for each one that is trained on."""
    threshold: float | None = None
    """Value of tau above which it is on; None is the paper's (B + 3 b) / (3 b) for B drawn and b trained on."""
    smoothing: float = 0.9
    """What a step leaves of the running tau."""
    measure_every: int = 10
    """While it is off, tau is measured in every so many steps, by a forward pass over the step's own samples."""

    tau: float = field(default=0.0, init=False, repr=False)
    on_steps: int = field(default=0, init=False, repr=False)
    scored: int = field(default=0, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.presample < 1:
            raise ValueError(f"presample must be at least 1, got {self.presample}")
        if not 0 <= self.smoothing < 1:
            raise ValueError(f"smoothing must be at least 0 and below 1, got {self.smoothing}")
        if self.measure_every < 1:
            raise ValueError(f"measure_every must be at least 1, got {self.measure_every}")

    @property
    def limit(self) -> float:
        """The tau above which it is on."""
        return (self.presample + 3) / 3 if self.threshold is None else self.threshold

    def draw(self, next_batch: Callable[[], Batch], count: int, ctx: Any) -> list[Batch]:
        need = count * ctx.args.train_batch_size
        if self.tau < self.limit or (self.tau == 0 and self.limit > 0):
            batches = [next_batch() for _ in range(count)]
            if ctx.step % self.measure_every == 0:
                self._measure(self._scores(ctx, batches))
            return batches
        batches = draw_rows(next_batch, round(need * self.presample))
        chances = self._measure(self._scores(ctx, batches))
        rng = ctx.rng(f"importance-sampling/{ctx.rank}", step=ctx.step)
        places, weights = draw_weighted(chances, need, rng)
        sizes = torch.cat([sizes_of(task_of(ctx, ctx.model), batch).cpu() for batch in batches])
        self.on_steps += 1
        # Divided by the mean number of targets of what was drawn: the expectation is then the mean over its targets.
        shares = (weights / (need * sizes.double().mean().clamp(min=1))).float()
        return joined(ctx, batches, places.tolist(), ctx.args.train_batch_size, {_WEIGHT: shares})

    def _scores(self, ctx: Any, batches: list[Batch]) -> Tensor:
        task = task_of(ctx, ctx.model)

        def look(model: nn.Module, batch: Batch) -> Tensor:
            gradient, _ = logit_gradients(task, model, batch)
            return gradient.flatten(1).norm(dim=1)

        scores = watched(ctx, ctx.model, look, batches)
        self.scored += len(scores)
        return scores

    def _measure(self, scores: Tensor) -> Tensor:
        chances = probabilities(scores)
        tau = variance_ratio(chances)
        self.tau = tau if self.tau == 0 else self.smoothing * self.tau + (1 - self.smoothing) * tau
        return chances

    def wrap_loss(self, compute_loss: Callable[..., Any], ctx: Any) -> Callable[..., Any]:
        def weighted(model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Any:
            if _WEIGHT not in inputs:
                return compute_loss(model, inputs, num_items_in_batch)
            inputs = dict(inputs)
            weights = inputs.pop(_WEIGHT)
            task = task_of(ctx, ctx.model)
            losses = task.per_sample_loss(model, inputs)
            loss = (losses * sizes_of(task, inputs).to(losses.device) * weights).sum()
            # The weights are made for a sum over the step; where the trainer takes it for a mean, it divides.
            adds_up = ctx.trainer.model_accepts_loss_kwargs and num_items_in_batch is not None
            return loss if adds_up else loss * ctx.trainer.current_gradient_accumulation_steps

        return weighted

    @property
    def state_per_rank(self) -> bool:
        return True

    def state_dict(self) -> dict[str, Any]:
        return {"tau": self.tau, "on_steps": self.on_steps, "scored": self.scored}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.tau, self.on_steps, self.scored = state["tau"], state["on_steps"], state["scored"]

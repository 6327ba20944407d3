"""RHO-loss: reducible holdout loss.

What it does: before training, a side model learns on held-out samples alone; its loss on every other sample is what
cannot be learned from it (noise) or need not be (easy). Each step draws ten times the samples it needs and trains on
those whose present loss exceeds that irreducible one most.

Helps: large, redundant, noisy data, where a forward pass costs much less than a step: wrongly labelled samples have
high losses under both models and are not chosen.
Does not help: small clean data; where the side model costs more than it saves. Kaddour et al. (2023) saw no gain over a
fully decayed baseline at a fixed budget.
Limits: the held-out share is not trained on. Each process chooses among its own draws. Losses are taken in eval mode
(the published code scores in train mode), so that chance does not decide.
Source: Mindermann et al., "Prioritized Training on Points that are Learnable, Worth Learning, and Not Yet Learnt", ICML
2022.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from thrifty import scores as score_files
from thrifty.errors import InputError
from thrifty.method import Batch, Method, NotApplicable, Paper, TrainingData, register
from thrifty.methods.selection._presample import draw_rows, joined, watched
from thrifty.methods.selection._scoring import (
    batches_of,
    model_fingerprint,
    sample_ids,
    stored_scores,
    take,
    task_of,
)
from thrifty.scores import Scores


def most_reducible(losses: Tensor, irreducible: Tensor, count: int) -> list[int]:
    """Places of the `count` samples whose loss exceeds the irreducible one most, ascending; of equal ones the first."""
    order = torch.argsort(losses.double() - irreducible.double(), descending=True, stable=True)
    return sorted(order[:count].tolist())


@register(
    "rho-loss",
    title="RHO-loss",
    section="selection",
    sources=[Paper("Mindermann et al.", 2022, "arXiv:2206.07137")],
    exact=False,
    claims=("draw",),
    conflicts_with={"packing": "a packed row holds several samples, and each has an irreducible loss of its own"},
    # Each process chooses among its own share of the data.
    processes=False,
    preset={"ratio": 0.5, "side_steps": 2},
)
@dataclass(kw_only=True)
class RhoLoss(Method):
    """Trains on what is learnable and not yet learnt."""

    ratio: float = 0.1
    """Share of the drawn samples that is trained on."""
    holdout_ratio: float = 0.2
    """Share of the data that the side model learns on, and that the run leaves out."""
    side_steps: int | None = None
    """Optimizer steps of the side model; None is a quarter of the run."""
    scores: str | None = None
    """A file of irreducible losses (`thrifty scores list`) to use: then nothing is held out."""

    found: Scores | None = field(default=None, init=False, repr=False)
    scored: int = field(default=0, init=False, repr=False)
    trained: int = field(default=0, init=False, repr=False)

    def __post_init__(self) -> None:
        if not 0 < self.ratio <= 1:
            raise ValueError(f"ratio must be above 0 and at most 1, got {self.ratio}")
        if not 0 < self.holdout_ratio < 1:
            raise ValueError(f"holdout_ratio must be above 0 and below 1, got {self.holdout_ratio}")
        if self.side_steps is not None and self.side_steps < 1:
            raise ValueError(f"side_steps must be at least 1, got {self.side_steps}")

    def prepare_data(self, data: TrainingData, ctx: Any) -> TrainingData:
        ids = sample_ids(data.train_dataset)
        if self.scores is not None:
            self.found = score_files.load(self.scores, key="methods.rho-loss.scores")
            self.found.of(ids, key="methods.rho-loss.scores", value=self.scores)
            return data
        order = torch.randperm(len(ids), generator=ctx.rng("rho-loss")).tolist()
        held = sorted(order[: max(1, round(self.holdout_ratio * len(ids)))])
        rest = sorted(set(range(len(ids))) - set(held))
        if not rest:
            raise NotApplicable(
                f"rho-loss: nothing is left of {len(ids)} samples beside those held out", fix="more data"
            )
        holdout, remaining = take(data.train_dataset, held), take(data.train_dataset, rest)
        steps = max(1, ctx.total_steps // 4) if self.side_steps is None else self.side_steps
        settings = {"holdout_ratio": self.holdout_ratio, "side_steps": steps}
        self.found = stored_scores(ctx, self.name, settings, remaining, lambda: self._compute(holdout, remaining, steps, ctx))  # fmt: skip  # noqa: E501
        return TrainingData(train_dataset=remaining, eval_dataset=data.eval_dataset, data_collator=data.data_collator)

    def _compute(self, holdout: Any, remaining: Any, steps: int, ctx: Any) -> np.ndarray[Any, Any]:
        start = ctx.model
        side = ctx.aux_run(
            f"rho-loss/{model_fingerprint(start)}", lambda: copy.deepcopy(start), holdout, max_steps=steps
        )
        task = task_of(ctx, side)
        with torch.no_grad():
            losses = [
                task.per_sample_loss(side, batch)
                for batch in batches_of(ctx, side, remaining, ctx.args.per_device_eval_batch_size)
            ]
        return torch.cat(losses).double().cpu().numpy()

    def draw(self, next_batch: Callable[[], Batch], count: int, ctx: Any) -> list[Batch]:
        size = ctx.args.train_batch_size
        if self.ratio == 1:
            return [next_batch() for _ in range(count)]
        batches = draw_rows(next_batch, math.ceil(count * size / self.ratio))
        losses = watched(ctx, ctx.model, self._losses(ctx), batches)
        assert self.found is not None
        ids = torch.cat([batch["sample_id"] for batch in batches]).tolist()
        irreducible = torch.from_numpy(self.found.of(ids))
        places = most_reducible(losses, irreducible, count * size)
        self.scored += len(losses)
        self.trained += len(places)
        return joined(ctx, batches, places, size, {})

    def _losses(self, ctx: Any) -> Callable[[nn.Module, Batch], Tensor]:
        def look(model: nn.Module, batch: Batch) -> Tensor:
            with torch.no_grad():
                return ctx.per_sample_loss(model, batch)

        return look

    @property
    def state_per_rank(self) -> bool:
        return True

    def state_dict(self) -> dict[str, Any]:
        return {"scored": self.scored, "trained": self.trained, "hash": self._hash()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["hash"] != self._hash():
            raise InputError(
                "the checkpoint was trained with other irreducible losses",
                key="methods.rho-loss",
                fix="resume with the same data and settings, or give the first run's losses as `scores: FILE`",
            )
        self.scored, self.trained = state["scored"], state["trained"]

    def _hash(self) -> str:
        assert self.found is not None
        return f"{len(self.found)}/{float(np.sum(self.found.values)):.9g}"

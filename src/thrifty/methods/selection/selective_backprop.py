"""Selective backpropagation.

What it does: looks at the loss of every sample in a cheap forward pass, picks samples with a probability that rises
with the rank of their loss among recent ones, and trains only on full batches of those.

Helps: data with many easy or redundant samples, where a forward pass costs much less than forward and backward.
Does not help: clean, hard or noisy data (wrong labels have high losses). Kaddour et al. (2023) saw no gain over a
fully decayed baseline at a fixed budget.
Limits: reads more data than it trains on: with beta 1 about twice as much.
Source: Jiang et al., "Accelerating Deep Learning by Focusing on the Biggest Losers", 2019.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from thrifty.method import Batch, Method, NotApplicable, Paper, register
from thrifty.samples import join_samples, split_samples


class LossSelector:
    """Picks samples by the rank of their loss, for one's own loop.

    Args:
        beta: Selectivity: the share that is picked tends to 1 / (beta + 1). 0 picks all.
        history: Number of recent losses that ranks are taken against.
        floor: The smallest probability of being picked.
    """

    def __init__(self, beta: float = 1.0, history: int = 1024, floor: float = 0.0) -> None:
        self.beta, self.floor = beta, floor
        self.losses: deque[float] = deque(maxlen=history)
        self.seen = 0

    def pick(self, losses: Tensor, rng: torch.Generator) -> Tensor:
        """Which samples to train on: a boolean tensor of shape (batch,) for losses of shape (batch,)."""
        values = losses.detach().float().cpu().numpy()
        self.losses.extend(values.tolist())
        self.seen += len(values)
        ordered = np.sort(np.asarray(self.losses, dtype=np.float64))
        rank = np.searchsorted(ordered, values, side="right") / len(ordered)
        probability = np.maximum(rank**self.beta, self.floor)
        return torch.rand(len(values), generator=rng, dtype=torch.float64) < torch.from_numpy(probability)


@register(
    "selective-backprop",
    title="Selective backpropagation",
    section="selection",
    sources=[Paper("Jiang et al.", 2019, "arXiv:1910.00762")],
    exact=False,
    micro_batch_invariant=False,
    claims=("draw",),
    # Each process ranks the losses of its own share of the data.
    processes=False,
    preset={"beta": 2.0, "history": 16},
    bench_order=74,
)
@dataclass(kw_only=True)
class SelectiveBackprop(Method):
    """Trains on the samples with the larger losses."""

    beta: float = 1.0
    """Selectivity: 1 trains on about half of the samples, 2 on a third; 0 on all."""
    history: int = 1024
    """Recent losses that a sample's loss is ranked against."""
    floor: float = 0.0
    """The smallest probability of being picked."""

    selector: LossSelector = field(init=False, repr=False)
    queue: list[Batch] = field(default_factory=list, init=False, repr=False)
    picked: int = field(default=0, init=False, repr=False)
    draws: int = field(default=0, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.beta < 0:
            raise ValueError(f"beta must not be negative, got {self.beta}")
        if not 0 <= self.floor <= 1:
            raise ValueError(f"floor must be between 0 and 1, got {self.floor}")
        if self.history < 1:
            raise ValueError(f"history must be at least 1, got {self.history}")
        self.selector = LossSelector(self.beta, self.history, self.floor)

    def prepare_model(self, model: nn.Module, ctx: Any) -> nn.Module:
        if not ctx.planning and ctx.data is not None and len(ctx.data.train_dataset) < ctx.args.train_batch_size:
            raise NotApplicable(
                f"selective-backprop: the data has only {len(ctx.data.train_dataset)} samples, less than one batch",
                key="per_device_train_batch_size",
                value=ctx.args.per_device_train_batch_size,
                fix="make it smaller",
            )
        return model

    def draw(self, next_batch: Callable[[], Batch], count: int, ctx: Any) -> list[Batch]:
        if self.beta == 0:
            return [next_batch() for _ in range(count)]
        size = ctx.args.train_batch_size
        while len(self.queue) < count * size:
            batch = next_batch()
            ids = {k: v for k, v in batch.items() if k == "sample_id"}
            losses = self._losses(ctx, {k: v for k, v in batch.items() if k != "sample_id"})
            keep = self.selector.pick(losses, ctx.rng(f"selective-backprop/{ctx.rank}", step=self.draws))
            self.draws += 1
            self.picked += int(keep.sum())
            self.queue += split_samples({**batch, **ids}, keep)
        chosen, self.queue = self.queue[: count * size], self.queue[count * size :]
        return [ctx.to_device(join_samples(chosen[i * size : (i + 1) * size])) for i in range(count)]

    def _losses(self, ctx: Any, batch: Batch) -> Tensor:
        model = ctx.trainer.model
        was_training = model.training
        model.eval()
        with torch.no_grad(), ctx.trainer.compute_loss_context_manager():
            losses = ctx.per_sample_loss(model, batch)
        model.train(was_training)
        return losses

    @property
    def state_per_rank(self) -> bool:
        return True

    def state_dict(self) -> dict[str, Any]:
        return {
            "losses": list(self.selector.losses),
            "seen": self.selector.seen,
            "queue": [dict(sample) for sample in self.queue],
            "picked": self.picked,
            "draws": self.draws,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.selector.losses = deque(state["losses"], maxlen=self.history)
        self.selector.seen, self.picked, self.draws = state["seen"], state["picked"], state["draws"]
        self.queue = [dict(sample) for sample in state["queue"]]

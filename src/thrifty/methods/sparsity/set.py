"""SET (sparse evolutionary training).

What it does: keeps most weights of the blocks' linear layers at zero, and every so often drops the smallest of the
others in each layer and grows as many at random free places. The number of connections of each layer never changes.

Helps: a sparse model from one run, better than a fixed random mask, without ever computing a dense gradient.
Does not help: speed or memory on dense hardware: zeros are multiplied like other numbers. RigL, which grows by
gradients, usually ends better.
Limits: linear layers inside the blocks only: not embeddings, norms, biases or the head.
Source: Mocanu et al., "Scalable Training of Artificial Neural Networks with Adaptive Sparse Connectivity Inspired by
Network Science", Nature Communications 2018.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from thrifty.method import NotApplicable, Paper, register
from thrifty.methods.sparsity._masks import (
    MaskedMethod,
    MaskedWeights,
    check_sparsity,
    erdos_renyi_kernel,
    random_masks,
)


@torch.no_grad()
def replace_connections(weight: Tensor, mask: Tensor, fraction: float, rng: torch.Generator) -> tuple[Tensor, Tensor]:
    """One generation: drops a share of the smallest weights and grows as many at random places that were free.

    Args:
        weight: Zero wherever the mask is False. Any shape.
        mask: Boolean, of the same shape.
        fraction: Share of the connections to replace.
        rng: On the CPU.

    Returns:
        The new mask, and the mask of the new connections. What was dropped does not grow at once.
    """
    alive = int(mask.sum())
    free = (~mask).flatten().nonzero().flatten()
    count = min(round(fraction * alive), len(free))
    scores = torch.where(mask, weight.abs(), -torch.ones_like(weight)).flatten()
    kept = torch.zeros_like(scores, dtype=torch.bool)
    kept[scores.topk(alive - count).indices] = True
    grown = torch.zeros_like(kept)
    grown[free[torch.randperm(len(free), generator=rng)[:count].to(free.device)]] = True
    return (kept | grown).view_as(mask), grown.view_as(mask)


class EvolvingWeights(MaskedWeights):
    """Masks that start at random and evolve, for one's own loop.

    After each backward: `mask_gradients()`; after each optimizer step: `apply(optimizer)`; after each epoch or so:
    `evolve(...)`.

    Args:
        parameters: The weights by name.
        sparsity: Share of zeros over all of them, more in larger layers (Erdos-Renyi).
        rng: Draws the first masks, on the CPU.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], sparsity: float, rng: torch.Generator) -> None:
        # New connections are drawn like the first ones.
        self.stds = {name: p.detach().float().std().item() for name, p in parameters.items()}
        counts = erdos_renyi_kernel({name: tuple(p.shape) for name, p in parameters.items()}, sparsity)
        super().__init__(parameters, random_masks(parameters, counts, rng))

    @torch.no_grad()
    def evolve(self, fraction: float, rng: torch.Generator, optimizer: torch.optim.Optimizer | None = None) -> int:
        """Replaces a share of each layer's connections; the new ones have fresh optimizer states. Returns how many."""
        replaced = 0
        for name, p in self.parameters.items():
            self.masks[name], grown = replace_connections(p, self.masks[name].to(p.device), fraction, rng)
            fresh = torch.randn(p.shape, generator=rng).to(p) * self.stds[name]
            p.copy_(torch.where(grown, fresh, p))
            replaced += int(grown.sum())
        self.apply(optimizer)
        return replaced


@register(
    "set",
    title="Sparse evolutionary training",
    section="sparsity",
    sources=[Paper("Mocanu et al.", 2018, "Nature Communications 9:2383")],
    exact=False,
    claims=("mask",),
    preset={"sparsity": 0.5, "every": 1, "end": 0.9},
)
@dataclass(kw_only=True)
class Set(MaskedMethod):
    """Sparse training whose smallest connections are replaced at random."""

    sparsity: float = 0.8
    """Share of zeros over the blocks' linear weights."""
    zeta: float = 0.3
    """Share of the connections that is replaced each time; 0 is static sparse training."""
    every: int | None = None
    """Optimizer steps between two replacements; None is an epoch."""
    end: float = 0.9
    """The share of the run after which nothing is replaced any more, so that new connections are trained."""

    weights: EvolvingWeights | None = field(default=None, init=False, repr=False)  # type: ignore[assignment]
    replaced: int = field(default=0, init=False, repr=False)

    def __post_init__(self) -> None:
        check_sparsity(self.sparsity)
        if not 0 <= self.zeta <= 1:
            raise ValueError(f"zeta must be between 0 and 1, got {self.zeta}")
        if self.every is not None and self.every < 1:
            raise ValueError(f"every must be at least 1, got {self.every}")
        if not 0 <= self.end <= 1:
            raise ValueError(f"end must be between 0 and 1, got {self.end}")

    def choose(self, model: nn.Module, parameters: dict[str, nn.Parameter], ctx: Any) -> EvolvingWeights:
        if self.every is None and not hasattr(ctx.data.train_dataset, "__len__"):
            raise NotApplicable(
                "set: the data set has no length, so nobody knows how long an epoch is",
                key="methods.set.every",
                fix="set it to a number of optimizer steps",
            )
        return EvolvingWeights(parameters, self.sparsity, ctx.rng("set"))

    def _period(self) -> int:
        if self.every is not None:
            return self.every
        args = self.ctx.args
        samples = len(self.ctx.data.train_dataset)
        return max(1, samples // (args.train_batch_size * args.world_size * args.gradient_accumulation_steps))

    def wrap_update(self, update: Callable[[], None], ctx: Any) -> Callable[[], None]:
        masked_update = super().wrap_update(update, ctx)

        def evolving_update() -> None:
            masked_update()
            step = ctx.step + 1
            if self.zeta > 0 and step % self._period() == 0 and step < self.end * ctx.total_steps:
                assert self.weights is not None
                self.replaced += self.weights.evolve(self.zeta, ctx.rng("set", step=step), ctx.optimizer)

        return evolving_update

    def on_replace(self, model: nn.Module, parameter_map: Mapping[str, str | None], ctx: Any) -> None:
        super().on_replace(model, parameter_map, ctx)
        assert self.weights is not None
        old = self.weights.stds
        sources = {name: parameter_map.get(name, name) or name for name in self.weights.parameters}
        self.weights.stds = {name: old.get(source, old.get(name, 0.0)) for name, source in sources.items()}

    def state_dict(self) -> dict[str, Any]:
        assert self.weights is not None
        return {**super().state_dict(), "replaced": self.replaced, "stds": self.weights.stds}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        assert self.weights is not None
        self.replaced, self.weights.stds = state["replaced"], state["stds"]

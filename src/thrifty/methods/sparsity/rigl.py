"""RigL (sparse training with moving connections).

What it does: keeps most weights of the blocks' linear layers at zero, and every so often drops the smallest of the
others and grows as many where the dense gradient is largest. The number of connections never changes.

Helps: finding a sparse model of a given size in one run, better than a fixed random mask.
Does not help: speed or memory on dense hardware: zeros are multiplied like other numbers. Quality falls with
sparsity.
Limits: linear layers inside the blocks only: not embeddings, norms, biases or the head.
Source: Evci et al., "Rigging the Lottery: Making All Tickets Winners", ICML 2020.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from thrifty.method import Paper, register
from thrifty.methods.sparsity._masks import (
    MaskedMethod,
    MaskedWeights,
    check_sparsity,
    erdos_renyi_kernel,
    random_masks,
)


def drop_fraction(step: int, end: float, alpha: float = 0.3) -> float:
    """The share of connections that move at a step: alpha at the start, falling to 0 at `end` along a cosine.

    >>> [round(drop_fraction(t, 100), 3) for t in (0, 50, 100)]
    [0.3, 0.15, 0.0]
    """
    return alpha / 2 * (1 + math.cos(math.pi * step / end)) if step < end else 0.0


@torch.no_grad()
def move_connections(weight: Tensor, gradient: Tensor, mask: Tensor, count: int) -> Tensor:
    """One update of a mask: drops the `count` smallest weights, then grows as many at the largest dense gradients.

    Args:
        weight: Zero wherever the mask is False. Any shape.
        gradient: The dense gradient, of the same shape.
        mask: Boolean, of the same shape.
        count: Connections to move.

    Returns:
        The new mask, with as many connections as the old one. Places that were just dropped may grow again.
    """
    alive = int(mask.sum())
    keep_scores = torch.where(mask, weight.abs(), -torch.ones_like(weight)).flatten()
    kept = torch.zeros_like(keep_scores, dtype=torch.bool)
    kept[keep_scores.topk(alive - count).indices] = True
    grow_scores = torch.where(kept, -torch.ones_like(keep_scores), gradient.abs().flatten().to(keep_scores.dtype))
    kept[grow_scores.topk(count).indices] = True
    return kept.view_as(mask)


class SparseWeights(MaskedWeights):
    """Masks that start at random and move, for one's own loop.

    After each backward: `mask_gradients()`, or, where connections move, `move(...)` and no optimizer step. After each
    optimizer step: `apply(optimizer)`.

    Args:
        parameters: The weights by name.
        sparsity: Share of zeros over all of them.
        rng: Draws the first masks, on the CPU.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], sparsity: float, rng: torch.Generator) -> None:
        counts = erdos_renyi_kernel({name: tuple(p.shape) for name, p in parameters.items()}, sparsity)
        super().__init__(parameters, random_masks(parameters, counts, rng))

    @torch.no_grad()
    def move(self, fraction: float, optimizer: torch.optim.Optimizer | None = None) -> int:
        """Moves a fraction of the connections by the dense gradients at hand. Returns how many moved."""
        moved = 0
        for name, p in self.parameters.items():
            if p.grad is None or not torch.isfinite(p.grad).all():
                continue
            mask = self.masks[name].to(p.device)
            count = round(fraction * int(mask.sum()))
            # New weights start at zero with fresh momentum; one that is dropped and regrown at once keeps its value.
            self.masks[name] = new = move_connections(p, p.grad, mask, count)
            moved += int((new & ~mask).sum())
        self.apply(optimizer)
        return moved


@register(
    "rigl",
    title="RigL",
    section="sparsity",
    sources=[Paper("Evci et al.", 2020, "arXiv:1911.11134")],
    exact=False,
    claims=("mask",),
    preset={"sparsity": 0.5, "every": 1, "end": 0.9},
    bench_order=78,
)
@dataclass(kw_only=True)
class RigL(MaskedMethod):
    """Dynamic sparse training."""

    sparsity: float = 0.8
    """Share of zeros over the blocks' linear weights."""
    every: int = 100
    """Optimizer steps between two moves."""
    alpha: float = 0.3
    """Share of the connections that moves at first."""
    end: float = 0.75
    """The share of the run after which nothing moves any more."""

    weights: SparseWeights | None = field(default=None, init=False, repr=False)  # type: ignore[assignment]
    moved: int = field(default=0, init=False, repr=False)
    _moving: bool = field(default=False, init=False, repr=False)

    def __post_init__(self) -> None:
        check_sparsity(self.sparsity)
        if self.every < 1:
            raise ValueError(f"every must be at least 1, got {self.every}")
        if not 0 <= self.alpha <= 1:
            raise ValueError(f"alpha must be between 0 and 1, got {self.alpha}")
        if not 0 <= self.end <= 1:
            raise ValueError(f"end must be between 0 and 1, got {self.end}")

    def choose(self, model: nn.Module, parameters: dict[str, nn.Parameter], ctx: Any) -> SparseWeights:
        return SparseWeights(parameters, self.sparsity, ctx.rng("rigl"))

    def on_step_begin(self, args: Any, state: Any, control: Any, **kw: Any) -> None:
        step = state.global_step
        # With alpha 0 the masks are static, and no step is spent on moving nothing.
        due = step > 0 and step % self.every == 0 and step < self.end * self.ctx.total_steps
        self._moving = due and self.alpha > 0

    def masks_gradients(self) -> bool:
        # A moving step keeps them dense: they tell where to grow.
        return not self._moving

    def wrap_update(self, update: Callable[[], None], ctx: Any) -> Callable[[], None]:
        masked_update = super().wrap_update(update, ctx)

        def moving_update() -> None:
            if not self._moving:
                masked_update()
                return
            assert self.weights is not None
            fraction = drop_fraction(ctx.step, self.end * ctx.total_steps, self.alpha)
            self.moved += self.weights.move(fraction, ctx.optimizer)
            ctx.skip_update()

        return moving_update

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "moved": self.moved}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.moved = state["moved"]

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

from thrifty.architecture import block_linears, main_blocks
from thrifty.method import Method, NotApplicable, Paper, register


def erdos_renyi_kernel(shapes: Mapping[str, tuple[int, ...]], sparsity: float) -> dict[str, int]:
    """Distributes the non-zeros over the layers: density in proportion to (sum of dims) / (product of dims), at most 1.

    Args:
        shapes: Shape of each weight.
        sparsity: Share of zeros over all of them.

    Returns:
        The number of non-zeros of each weight; their sum is exact.

    >>> erdos_renyi_kernel({"a": (64, 32), "b": (32, 16), "c": (16, 10)}, 0.8)
    {'a': 307, 'b': 154, 'c': 83}
    """
    sizes = {name: math.prod(shape) for name, shape in shapes.items()}
    raw = {name: sum(shape) / sizes[name] for name, shape in shapes.items()}
    target = round((1 - sparsity) * sum(sizes.values()))
    dense: set[str] = set()
    scale = 1.0
    while len(dense) < len(shapes):
        rest = [name for name in shapes if name not in dense]
        scale = (target - sum(sizes[name] for name in dense)) / sum(raw[name] * sizes[name] for name in rest)
        full = {name for name in rest if scale * raw[name] > 1}
        if not full:
            break
        dense |= full
    exact = {name: sizes[name] if name in dense else scale * raw[name] * sizes[name] for name in shapes}
    counts = {name: math.floor(value) for name, value in exact.items()}
    # The largest remainders get the last few, so that the total is exact.
    missing = target - sum(counts.values())
    for name in sorted(exact, key=lambda n: counts[n] - exact[n])[:missing]:
        counts[name] += 1
    return counts


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


class SparseWeights:
    """Masks on some weights of a model, for one's own loop.

    After each backward: `mask_gradients()`, or, where connections move, `move(...)` and no optimizer step. After each
    optimizer step: `apply(optimizer)`.

    Args:
        parameters: The weights by name.
        sparsity: Share of zeros over all of them.
        rng: Draws the first masks, on the CPU.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], sparsity: float, rng: torch.Generator) -> None:
        counts = erdos_renyi_kernel({name: tuple(p.shape) for name, p in parameters.items()}, sparsity)
        self.parameters = dict(parameters)
        self.masks: dict[str, Tensor] = {}
        for name, p in parameters.items():
            mask = torch.zeros(p.numel(), dtype=torch.bool)
            mask[torch.randperm(p.numel(), generator=rng)[: counts[name]]] = True
            self.masks[name] = mask.view(p.shape).to(p.device)
        self.apply()

    @torch.no_grad()
    def apply(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Zeroes the weights outside of the masks, and their optimizer state."""
        for name, p in self.parameters.items():
            mask = self.masks[name] = self.masks[name].to(p.device)
            p.mul_(mask)
            for value in optimizer.state.get(p, {}).values() if optimizer is not None else ():
                if torch.is_tensor(value) and value.shape == p.shape:
                    value.mul_(mask)

    @torch.no_grad()
    def mask_gradients(self) -> None:
        """Zeroes the gradients outside of the masks, before they are clipped and used."""
        for name, p in self.parameters.items():
            if p.grad is not None:
                p.grad.mul_(self.masks[name].to(p.device))

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
)
@dataclass(kw_only=True)
class RigL(Method):
    """Dynamic sparse training."""

    sparsity: float = 0.8
    """Share of zeros over the blocks' linear weights."""
    every: int = 100
    """Optimizer steps between two moves."""
    alpha: float = 0.3
    """Share of the connections that moves at first."""
    end: float = 0.75
    """The share of the run after which nothing moves any more."""

    weights: SparseWeights | None = field(default=None, init=False, repr=False)
    moved: int = field(default=0, init=False, repr=False)
    ctx: Any = field(default=None, init=False, repr=False)
    _moving: bool = field(default=False, init=False, repr=False)

    def __post_init__(self) -> None:
        if not 0 < self.sparsity < 1:
            raise ValueError(f"sparsity must be between 0 and 1, got {self.sparsity}")
        if self.every < 1:
            raise ValueError(f"every must be at least 1, got {self.every}")
        if not 0 <= self.alpha <= 1:
            raise ValueError(f"alpha must be between 0 and 1, got {self.alpha}")
        if not 0 <= self.end <= 1:
            raise ValueError(f"end must be between 0 and 1, got {self.end}")

    def _parameters(self, model: nn.Module) -> dict[str, nn.Parameter]:
        linears = block_linears(main_blocks(model, "rigl"))
        return {f"{n}.weight": m.weight for n, m in linears.items() if m.weight.requires_grad}  # type: ignore[misc]

    def prepare_model(self, model: nn.Module, ctx: Any) -> nn.Module:
        self.ctx = ctx
        parameters = self._parameters(model)
        if not parameters:
            raise NotApplicable("rigl: no linear weight of the blocks is trained", fix="unfreeze them, or remove rigl")
        self.weights = SparseWeights(parameters, self.sparsity, ctx.rng("rigl"))
        return model

    def on_train_begin(self, args: Any, state: Any, control: Any, **kw: Any) -> None:
        assert self.weights is not None
        self.weights.parameters = self._parameters(kw["model"])
        self.weights.apply()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kw: Any) -> None:
        step = state.global_step
        # With alpha 0 the masks are static, and no step is spent on moving nothing.
        due = step > 0 and step % self.every == 0 and step < self.end * self.ctx.total_steps
        self._moving = due and self.alpha > 0

    def wrap_training_step(self, step: Callable[..., Tensor], ctx: Any) -> Callable[..., Tensor]:
        def masked(model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
            loss = step(model, inputs, num_items_in_batch)
            # Only at the last micro-batch are the gradients complete, and equal on all processes. A moving step keeps
            # them dense: they tell where to grow.
            if ctx.syncing and not self._moving:
                assert self.weights is not None
                self.weights.mask_gradients()
            return loss

        return masked

    def wrap_update(self, update: Callable[[], None], ctx: Any) -> Callable[[], None]:
        def masked_update() -> None:
            assert self.weights is not None
            if self._moving:
                fraction = drop_fraction(ctx.step, self.end * ctx.total_steps, self.alpha)
                self.moved += self.weights.move(fraction, ctx.optimizer)
                ctx.skip_update()
                return
            update()
            self.weights.apply(ctx.optimizer)

        return masked_update

    def on_replace(self, model: nn.Module, parameter_map: Mapping[str, str | None], ctx: Any) -> None:
        assert self.weights is not None
        old = self.weights.masks
        self.weights.parameters = self._parameters(model)
        self.weights.masks = {}
        for name, p in self.weights.parameters.items():
            source = parameter_map.get(name, name) or name
            mask = old.get(source, old.get(name))
            if mask is None or mask.shape != p.shape:
                raise NotApplicable(
                    f"rigl: the model changed, and '{name}' has no mask of shape {tuple(p.shape)} to inherit",
                    fix="remove rigl, or the method that changes the model",
                )
            self.weights.masks[name] = mask.clone()
        self.weights.apply(ctx.optimizer)

    def finish(self, model: nn.Module, ctx: Any) -> nn.Module:
        assert self.weights is not None
        self.weights.parameters = self._parameters(model)
        self.weights.apply()
        return model

    def state_dict(self) -> dict[str, Any]:
        assert self.weights is not None
        return {"masks": {n: m.cpu() for n, m in self.weights.masks.items()}, "moved": self.moved}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        # At once, not at the next start: the best checkpoint is loaded after training, right before `finish` masks.
        assert self.weights is not None
        self.weights.masks, self.moved = dict(state["masks"]), state["moved"]

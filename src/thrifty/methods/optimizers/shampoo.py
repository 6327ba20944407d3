"""Shampoo.

What it does: keeps for each weight matrix the sums of G G' and G' G of its gradients, and multiplies the gradient from
both sides by their inverse fourth roots: second-order information for the price of two small matrices. The length of
the step is taken from Adam (grafting), so that AdamW's learning rate fits.

Helps: pre-training: fewer steps to a loss than AdamW, above all with large batches.
Does not help: where a step is short: the roots cost time, though they are renewed only now and then; fine-tuning.
Costs: for a matrix of m x n: 2 m^2 + 2 n^2 numbers, besides Adam's two states.
Limits: needs whole matrices. The vocabulary side of embeddings and heads, and sides longer than `max_dimension`,
are left alone; vectors are trained with AdamW. Roots are taken in float64; on several processes each computes all.
Source: Gupta, Koren and Singer, "Shampoo: Preconditioned Stochastic Tensor Optimization", ICML 2018; Anil et al.,
"Scalable Second Order Optimization for Deep Learning", 2020.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from thrifty.method import Method, Paper, register
from thrifty.methods.optimizers._adam import ByParameter, adam_direction, adamw_step, eigen
from thrifty.methods.optimizers._groups import matrix_sides, refuse_sharding, vocabulary_groups

Grafting = Literal["adam", "none"]


def inverse_root(matrix: Tensor, power: int, eps: float = 1e-6) -> Tensor:
    """matrix^(-1/power) of a symmetric positive semi-definite matrix, by eigenvectors in float64.

    Args:
        matrix: Shape (n, n).
        power: 4 for a gradient with two sides, 2 for one.
        eps: Eigenvalues below eps x the largest count as that.

    Returns:
        Shape (n, n), with the matrix's type.
    """
    values, vectors = eigen(matrix)
    values = values.clamp_min(0) + eps * values[-1].clamp_min(1e-30)
    return ((vectors * values.pow(-1 / power)) @ vectors.T).to(matrix.dtype)


class ShampooOptimizer(ByParameter):
    """Shampoo for matrices, AdamW for everything else.

    Args:
        params: Parameters or groups; in a group with `vocabulary=True` the first axis is not preconditioned.
        lr: Learning rate.
        betas: Momentum, and decay of the preconditioners and of Adam's second mean. A second value of 1 sums, as in the
            first paper.
        eps: Added to Adam's denominator.
        weight_decay: Decoupled decay.
        every: Steps between two renewals of the roots.
        max_dimension: Longer sides are not preconditioned.
        grafting: `adam` gives each step the length of Adam's, `none` leaves it as it is.
        root_eps: Smallest eigenvalue, relative to the largest.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        every: int = 10,
        max_dimension: int = 8192,
        grafting: Grafting = "adam",
        root_eps: float = 1e-6,
    ) -> None:
        self.every, self.max_dimension, self.grafting, self.root_eps = every, max_dimension, grafting, root_eps
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "vocabulary": False}
        super().__init__(params, defaults)

    def update(self, p: Tensor, gradient: Tensor, group: dict[str, Any], index: int) -> None:
        state = self.state[p]
        gradient = gradient.float()
        matrix = gradient.flatten(1) if p.ndim > 1 else gradient
        sides = matrix_sides(matrix, group, self.max_dimension) if p.ndim > 1 else []
        if not sides:
            adamw_step(p, gradient, state, group)
            return
        beta1, beta2 = group["betas"]
        count = state["count"] = state.get("count", 0) + 1
        for side in sides:
            square = matrix @ matrix.T if side == 0 else matrix.T @ matrix
            sums = state.setdefault(f"sums_{side}", torch.zeros_like(square))
            sums.add_(square) if beta2 == 1 else sums.mul_(beta2).add_(square, alpha=1 - beta2)
            if (count - 1) % self.every == 0:
                # The decay's bias is a factor that grafting takes away; without grafting it is divided out.
                unbiased = sums if beta2 == 1 else sums / (1 - beta2**count)
                state[f"root_{side}"] = inverse_root(unbiased, 2 * len(sides), self.root_eps)
        direction = matrix
        for side in sides:
            root = state[f"root_{side}"]
            direction = root @ direction if side == 0 else direction @ root
        if self.grafting == "adam":
            step = adam_direction(state, matrix, (beta1, min(beta2, 0.999)), group["eps"])
            direction = direction * (step.norm() / direction.norm().clamp_min(1e-30))
        momentum = state.setdefault("momentum", torch.zeros_like(matrix))
        momentum.mul_(beta1).add_(direction, alpha=1 - beta1)
        # As in Adam, the first steps are not shortened by the zeros that the mean begins with.
        update = (momentum / (1 - beta1**count)).view_as(p)
        p.mul_(1 - group["lr"] * group["weight_decay"]).add_(update.to(p.dtype), alpha=-group["lr"])


@register(
    "shampoo",
    title="Shampoo",
    section="optimizers",
    sources=[
        Paper("Gupta, Koren and Singer", 2018, "arXiv:1802.09568"),
        Paper("Anil et al.", 2020, "arXiv:2002.09018"),
    ],
    exact=False,
    # Roots of nearly singular matrices magnify the last bits of a gradient.
    micro_batch_invariant=False,
    claims=("optimizer",),
    preset={"every": 2},
    conflicts_with={"lora": "adapters are thin factors, whose preconditioned step is not that of the weight"},
)
@dataclass(kw_only=True)
class Shampoo(Method):
    """Gradients preconditioned from both sides. Learning rate, betas, epsilon and decay are those of the run."""

    every: int = 10
    """Steps between two renewals of the roots."""
    max_dimension: int = 8192
    """Longer sides of a matrix are not preconditioned."""
    grafting: Grafting = "adam"
    """adam: steps have the length of Adam's; none: they are left as they are."""
    root_eps: float = 1e-6
    """Smallest eigenvalue of a preconditioner, relative to its largest: what is below is rounding of its sums."""

    def __post_init__(self) -> None:
        for key in ("every", "max_dimension"):
            if getattr(self, key) < 1:
                raise ValueError(f"{key} must be at least 1, got {getattr(self, key)}")
        if self.root_eps < 0:
            raise ValueError(f"root_eps must not be negative, got {self.root_eps}")

    def configure(self, args: Any, ctx: Any) -> dict[str, Any]:
        refuse_sharding(self.name, args)
        return {}

    def build_optimizer(self, groups: list[dict[str, Any]], ctx: Any) -> torch.optim.Optimizer:
        args = ctx.args
        return ShampooOptimizer(
            vocabulary_groups(groups, ctx.model),
            lr=args.learning_rate,
            betas=(args.adam_beta1, args.adam_beta2),
            eps=args.adam_epsilon,
            every=self.every,
            max_dimension=self.max_dimension,
            grafting=self.grafting,
            root_eps=self.root_eps,
        )

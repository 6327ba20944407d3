"""GaLore.

What it does: projects the gradient of each hidden matrix onto its strongest directions, runs Adam on the small result,
and projects the step back. The directions are found anew every `every` steps.

Helps: memory: Adam's states shrink to rank / min(m, n) of their size, while all weights are trained.
Does not help: small matrices or large ranks; and each renewal takes a singular value decomposition.
Limits: needs whole matrices. Adam's means stay in the old directions after a renewal. Full rank is not AdamW, since
Adam is not invariant to rotations. Embeddings, heads and vectors are trained with AdamW. The update is taken once an
optimizer step, so that gradients may be accumulated.
Source: Zhao et al., "GaLore: Memory-Efficient LLM Training by Gradient Low-Rank Projection", ICML 2024.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from thrifty.method import Method, Paper, register
from thrifty.methods.optimizers._adam import ByParameter, adam_direction, adamw_step
from thrifty.methods.optimizers._groups import check_rank, hidden_groups, refuse_sharding


def strongest_directions(gradient: Tensor, rank: int) -> Tensor:
    """The singular vectors of the shorter side with the largest singular values.

    Args:
        gradient: Shape (m, n).
        rank: How many; at most the shorter side.

    Returns:
        Orthonormal columns of shape (min(m, n), rank), in float32.
    """
    matrix = gradient.float()
    left = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    return torch.linalg.svd(left, full_matrices=False)[0][:, :rank].contiguous()


class GaLoreOptimizer(ByParameter):
    """Adam in a low-rank subspace for groups with a `rank`, AdamW for the others.

    Args:
        params: Groups; `rank` is None or the rank of the projections.
        lr: Learning rate.
        betas: Decay of the running means.
        eps: Added to the denominator.
        weight_decay: Decoupled decay.
        every: Steps between two renewals of the directions.
        scale: What projected steps are multiplied by.
        inner: `adam`, or `sgd` for plain gradient steps in the subspace.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        every: int = 200,
        scale: float = 0.25,
        inner: Literal["adam", "sgd"] = "adam",
    ) -> None:
        self.every, self.scale, self.inner = every, scale, inner
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "rank": None})

    def update(self, p: Tensor, gradient: Tensor, group: dict[str, Any], index: int) -> None:
        state = self.state[p]
        if group["rank"] is None or p.ndim != 2 or (group["rank"] >= min(p.shape) and self.inner == "adam"):
            adamw_step(p, gradient, state, group)
            return
        count = state["count"] = state.get("count", -1) + 1
        if count % self.every == 0:
            state["directions"] = strongest_directions(gradient, group["rank"])
        directions, wide = state["directions"], p.shape[0] <= p.shape[1]
        small = directions.T @ gradient.float() if wide else gradient.float() @ directions
        if self.inner == "adam":
            small = adam_direction(state, small, group["betas"], group["eps"])
        step = directions @ small if wide else small @ directions.T
        p.mul_(1 - group["lr"] * group["weight_decay"]).add_(step.to(p.dtype), alpha=-group["lr"] * self.scale)


@register(
    "galore",
    title="GaLore",
    section="optimizers",
    sources=[Paper("Zhao et al.", 2024, "arXiv:2403.03507")],
    exact=False,
    # Singular vectors of nearly equal singular values turn with the last bits of a gradient.
    micro_batch_invariant=False,
    claims=("optimizer",),
    preset={"rank": 4, "every": 2},
    conflicts_with={
        "section:peft": "adapters are of low rank already",
        "section:overparameterization": "the gradient of a factor is not that of the weight",
    },
    choices={"allow": [{}]},
)
@dataclass(kw_only=True)
class GaLore(Method):
    """Adam on gradients of low rank. Learning rate, betas, epsilon and decay are those of the run."""

    rank: int = 128
    """Directions that the gradient of a matrix is projected onto; smaller matrices are trained with AdamW."""
    every: int = 200
    """Steps between two renewals of the directions."""
    scale: float = 0.25
    """What projected steps are multiplied by."""

    def __post_init__(self) -> None:
        for key in ("rank", "every"):
            if getattr(self, key) < 1:
                raise ValueError(f"{key} must be at least 1, got {getattr(self, key)}")
        if self.scale <= 0:
            raise ValueError(f"scale must be above 0, got {self.scale}")

    def configure(self, args: Any, ctx: Any) -> dict[str, Any]:
        refuse_sharding(self.name, args)
        return {}

    def prepare_model(self, model: nn.Module, ctx: Any) -> nn.Module:
        rank = self.rank
        check_rank(model, self.name, rank, self.rank, "set it to a fraction of the hidden size")
        return model

    def build_optimizer(self, groups: list[dict[str, Any]], ctx: Any) -> torch.optim.Optimizer:
        parts = hidden_groups(groups, ctx.model, self.rank)
        return GaLoreOptimizer(
            parts,
            lr=ctx.args.learning_rate,
            betas=(ctx.args.adam_beta1, ctx.args.adam_beta2),
            eps=ctx.args.adam_epsilon,
            every=self.every,
            scale=self.scale,
        )

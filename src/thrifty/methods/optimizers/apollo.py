"""APOLLO.

What it does: scales the raw gradient of each hidden matrix, channel by channel (or as a whole, in the mini form), by
the factor that Adam would scale it by. Adam runs on a random projection of low rank, from which the factors are read.

Helps: memory: states shrink to rank / min(m, n) of Adam's, in the mini form to next to nothing; no decomposition.
Does not help: small matrices or large ranks.
Limits: needs whole matrices. A step may be at most 1.01 times as long as the one before. Embeddings, heads and vectors
are trained with AdamW. The random projection is made anew from a seed every `every` steps and is not stored.
Source: Zhu et al., "APOLLO: SGD-like Memory, AdamW-level Performance", MLSys 2025.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from thrifty.method import Method, Paper, register
from thrifty.methods.optimizers._adam import ByParameter, adam_direction, adamw_step
from thrifty.methods.optimizers._groups import check_rank, hidden_groups, refuse_sharding

GROWTH_LIMIT = 1.01  # how much longer a step may be than the one before


def random_projection(rank: int, size: int, seed: int, device: torch.device | str = "cpu") -> Tensor:
    """A matrix of shape (rank, size) with entries N(0, 1 / rank), equal on all devices of a kind."""
    generator = torch.Generator(device=device).manual_seed(seed)
    return torch.randn(rank, size, generator=generator, device=device) / rank**0.5


def limit_growth(update: Tensor, state: dict[str, Any], limit: float = GROWTH_LIMIT) -> Tensor:
    """Shortens an update to `limit` x the length of the one before, which `state` remembers."""
    length = update.norm()
    if "length" in state:
        allowed = torch.minimum(length, limit * state["length"])
        update = update * (allowed / length.clamp_min(1e-30))
        length = allowed
    state["length"] = length
    return update


class ApolloOptimizer(ByParameter):
    """APOLLO for groups with a `rank`, AdamW for the others.

    Args:
        params: Groups; `rank` is None or the rank of the projections.
        lr: Learning rate.
        betas: Decay of the running means.
        eps: Added to the denominator.
        weight_decay: Decoupled decay.
        every: Steps between two projections.
        scale: What scaled gradients are multiplied by.
        per_channel: One factor a channel of the longer side, or one for the whole matrix.
        seed: Of the projections.
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
        scale: float = 1.0,
        per_channel: bool = True,
        seed: int = 0,
    ) -> None:
        self.every, self.scale, self.per_channel, self.seed = every, scale, per_channel, seed
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "rank": None})
        self._numbers = {id(p): n for n, p in enumerate(p for group in self.param_groups for p in group["params"])}

    def update(self, p: Tensor, gradient: Tensor, group: dict[str, Any], index: int) -> None:
        state = self.state[p]
        if group["rank"] is None or p.ndim != 2:
            adamw_step(p, gradient, state, group)
            return
        wide = p.shape[0] <= p.shape[1]
        matrix = (gradient if wide else gradient.T).float()  # the shorter side first
        count = state["count"] = state.get("count", -1) + 1
        if count % self.every == 0:
            state["seed"] = (self.seed * 1_000_003 + self._numbers[id(p)] * 7919 + count) % 2**31
        projection = random_projection(group["rank"], matrix.shape[0], state["seed"], matrix.device)
        small = projection @ matrix
        adapted = adam_direction(state, small, group["betas"], group["eps"])
        if self.per_channel:
            factors = adapted.norm(dim=0) / small.norm(dim=0).clamp_min(1e-30)
        else:
            factors = adapted.norm() / small.norm().clamp_min(1e-30)
        step = limit_growth(matrix * factors * self.scale, state)
        step = step if wide else step.T
        p.mul_(1 - group["lr"] * group["weight_decay"]).add_(step.to(p.dtype), alpha=-group["lr"])


@register(
    "apollo",
    title="APOLLO",
    section="optimizers",
    sources=[Paper("Zhu et al.", 2025, "arXiv:2412.05270")],
    exact=False,
    claims=("optimizer",),
    preset={"rank": 4, "every": 2},
    conflicts_with={
        "section:peft": "adapters are of low rank already",
        "section:overparameterization": "the gradient of a factor is not that of the weight",
    },
    choices={"allow": [{}]},
)
@dataclass(kw_only=True)
class Apollo(Method):
    """Gradients scaled by factors of Adam on a random projection. Learning rate, betas, epsilon and decay are those of
    the run."""

    rank: int = 256
    """Rank of the projection; smaller matrices are trained with AdamW."""
    every: int = 200
    """Steps between two projections."""
    scale: float | None = None
    """What scaled gradients are multiplied by; None is 1, in the mini form 128."""
    mini: bool = False
    """APOLLO-Mini: rank 1, and one factor for the whole matrix."""

    def __post_init__(self) -> None:
        for key in ("rank", "every"):
            if getattr(self, key) < 1:
                raise ValueError(f"{key} must be at least 1, got {getattr(self, key)}")
        if self.scale is not None and self.scale <= 0:
            raise ValueError(f"scale must be above 0, got {self.scale}")

    def configure(self, args: Any, ctx: Any) -> dict[str, Any]:
        refuse_sharding(self.name, args)
        return {}

    def prepare_model(self, model: nn.Module, ctx: Any) -> nn.Module:
        rank = 1 if self.mini else self.rank
        check_rank(model, self.name, rank, self.rank, "set it to a fraction of the hidden size, or mini: true")
        return model

    def build_optimizer(self, groups: list[dict[str, Any]], ctx: Any) -> torch.optim.Optimizer:
        parts = hidden_groups(groups, ctx.model, 1 if self.mini else self.rank)
        return ApolloOptimizer(
            parts,
            lr=ctx.args.learning_rate,
            betas=(ctx.args.adam_beta1, ctx.args.adam_beta2),
            eps=ctx.args.adam_epsilon,
            every=self.every,
            scale=self.scale or (128.0 if self.mini else 1.0),
            per_channel=not self.mini,
            seed=ctx.args.seed,
        )

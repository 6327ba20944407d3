"""LAMB.

What it does: takes Adam's direction for each tensor and gives the step a length proportional to the norm of the tensor.

Helps: very large batches, where one learning rate for all tensors is too large for some and too small for others.
Does not help: small batches; there AdamW is as good and cheaper to tune.
Limits: needs whole tensors: not with states flattened or sharded by row. No gradient clip of its own.
Source: You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes", ICLR 2020.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from thrifty.method import Method, Paper, register
from thrifty.methods.optimizers._adam import ByParameter, adam_direction
from thrifty.methods.optimizers._groups import refuse_sharding
from thrifty.methods.optimizers._trust_ratio import adapted_groups, trust_ratio


class LambOptimizer(ByParameter):
    """LAMB as in the paper: both moments are bias-corrected, and the norm of the weights is not clipped.

    Args:
        params: Parameters or groups; a group with `adapt=False` takes plain Adam steps.
        lr: Learning rate: the share of a tensor's norm that a step moves it by.
        betas: Decay of the running means.
        eps: Added to the denominator.
        weight_decay: Part of the update before its norm is taken.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "adapt": True}
        super().__init__(params, defaults)

    def update(self, p: Tensor, gradient: Tensor, group: dict[str, Any], index: int) -> None:
        update = adam_direction(self.state[p], gradient, group["betas"], group["eps"])
        update.add_(p, alpha=group["weight_decay"])
        if group["adapt"]:
            update.mul_(trust_ratio(p, update))
        p.add_(update, alpha=-group["lr"])


@register(
    "lamb",
    title="LAMB",
    section="optimizers",
    sources=[Paper("You et al.", 2020, "arXiv:1904.00962")],
    exact=False,
    claims=("optimizer",),
)
@dataclass(kw_only=True)
class Lamb(Method):
    """Layer-wise adaptive steps on Adam's direction."""

    betas: tuple[float, float] = (0.9, 0.999)
    """Decay of the two running means."""
    eps: float = 1e-6
    """Added to the denominator."""

    def configure(self, args: Any, ctx: Any) -> dict[str, Any]:
        refuse_sharding("lamb", args)
        return {}

    def build_optimizer(self, groups: list[dict[str, Any]], ctx: Any) -> torch.optim.Optimizer:
        return LambOptimizer(adapted_groups(groups), lr=ctx.args.learning_rate, betas=self.betas, eps=self.eps)

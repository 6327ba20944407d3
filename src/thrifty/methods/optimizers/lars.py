"""LARS.

What it does: momentum SGD whose step for each tensor is proportional to the ratio of the tensor's norm to its
gradient's.

Helps: very large batches with SGD, above all convolutional networks.
Does not help: Transformers, where LAMB or AdamW are better starts.
Limits: needs whole tensors: not with states flattened or sharded by row.
Source: You, Gitman and Ginsburg, "Large Batch Training of Convolutional Networks", 2017.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from thrifty.method import Method, Paper, register
from thrifty.methods.optimizers._adam import ByParameter
from thrifty.methods.optimizers._groups import refuse_sharding
from thrifty.methods.optimizers._trust_ratio import adapted_groups


class LarsOptimizer(ByParameter):
    """LARS as in the paper: the learning rate is inside the momentum buffer.

    Args:
        params: Parameters or groups; a group with `adapt=False` takes plain momentum steps.
        lr: Learning rate.
        momentum: Decay of the buffer.
        trust: The coefficient that a tensor's norm is multiplied by.
        weight_decay: Added to the gradient, and to the denominator of the ratio.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1.0,
        momentum: float = 0.9,
        trust: float = 1e-3,
        weight_decay: float = 0.0,
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "trust": trust, "weight_decay": weight_decay, "adapt": True}
        super().__init__(params, defaults)

    def update(self, p: Tensor, gradient: Tensor, group: dict[str, Any], index: int) -> None:
        rate: Any = group["lr"]
        decay = group["weight_decay"]
        if group["adapt"]:
            w, g = p.norm(), gradient.norm()
            local = group["trust"] * w / (g + decay * w)
            rate = rate * torch.where((w > 0) & (g > 0), local, torch.ones_like(w))
        buffer = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
        buffer.mul_(group["momentum"]).add_(rate * (gradient + decay * p))
        p.sub_(buffer)


@register(
    "lars",
    title="LARS",
    section="optimizers",
    sources=[Paper("You, Gitman and Ginsburg", 2017, "arXiv:1708.03888")],
    exact=False,
    claims=("optimizer",),
)
@dataclass(kw_only=True)
class Lars(Method):
    """Layer-wise adaptive momentum SGD. Its learning rate is of the order of 1 to 10."""

    momentum: float = 0.9
    """Decay of the momentum buffer."""
    trust: float = 1e-3
    """The coefficient that a tensor's norm is multiplied by."""

    def configure(self, args: Any, ctx: Any) -> dict[str, Any]:
        refuse_sharding("lars", args)
        return {}

    def build_optimizer(self, groups: list[dict[str, Any]], ctx: Any) -> torch.optim.Optimizer:
        return LarsOptimizer(
            adapted_groups(groups), lr=ctx.args.learning_rate, momentum=self.momentum, trust=self.trust
        )

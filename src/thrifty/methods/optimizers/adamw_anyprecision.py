"""AdamW in any precision, with Kahan summation.

What it does: AdamW whose momentum, variance and weights may have data types of their own. What rounding cuts off an
update is kept in a compensation buffer and added to the next one, so that weights in bfloat16 learn from small updates.

Helps: training with bfloat16 weights, without a float32 copy.
Does not help: with float32 weights: there is nothing to compensate.
Limits: with compensation, 2 bytes a parameter more than without.
Source: torchdistx (Meta, 2022); Kahan, 1965; Zamirai et al., "Revisiting BFloat16 Training", 2020.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch

from thrifty.method import Method, Paper, register
from thrifty.methods.optimizers._adam import ByParameter
from thrifty.methods.optimizers._groups import clean

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class AnyPrecisionAdamW(ByParameter):
    """AdamW with chosen state types and, optionally, compensated weights.

    Args:
        params: Parameters or groups.
        lr: Learning rate.
        betas: Decay of the running means.
        eps: Added to the denominator.
        weight_decay: Decoupled decay. It is part of the compensated sum.
        kahan: Keep a compensation for weights in low precision.
        momentum_dtype: Type of the first state.
        variance_dtype: Type of the second state.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        kahan: bool = True,
        momentum_dtype: torch.dtype = torch.float32,
        variance_dtype: torch.dtype = torch.float32,
    ) -> None:
        self.kahan, self.momentum_dtype, self.variance_dtype = kahan, momentum_dtype, variance_dtype
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def update(self, p: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any], index: int) -> None:
        state = self.state[p]
        if not state:
            state["step"] = torch.zeros(())
            state["exp_avg"] = torch.zeros_like(p, dtype=self.momentum_dtype)
            state["exp_avg_sq"] = torch.zeros_like(p, dtype=self.variance_dtype)
            if self.kahan and p.dtype != torch.float32:
                state["compensation"] = torch.zeros_like(p)
        state["step"] += 1
        beta1, beta2 = group["betas"]
        gradient = gradient.float()
        m, v = state["exp_avg"], state["exp_avg_sq"]
        m.copy_(m.float().lerp(gradient, 1 - beta1))
        v.copy_(v.float().mul(beta2).addcmul(gradient, gradient, value=1 - beta2))
        count = float(state["step"])
        m_hat = m.float() / (1 - beta1**count)
        v_hat = v.float() / (1 - beta2**count)
        change = -group["lr"] * (m_hat / (v_hat.sqrt() + group["eps"]) + group["weight_decay"] * p.float())
        if "compensation" not in state:
            p.add_(change.to(p.dtype)) if p.dtype != torch.float32 else p.add_(change)
            return
        lost = state["compensation"]
        total = (change + lost.float()).to(p.dtype)
        new = p + total
        lost.copy_(total - (new - p) + ((change + lost.float()) - total.float()).to(p.dtype))
        p.copy_(new)


@register(
    "adamw-anyprecision",
    title="AdamW in any precision",
    section="optimizers",
    sources=[Paper("Meta", 2022, "torchdistx"), Paper("Zamirai et al.", 2020, "arXiv:2010.06192")],
    exact=False,
    micro_batch_invariant=False,
    claims=("optimizer",),
)
@dataclass(kw_only=True)
class AnyPrecision(Method):
    """AdamW with chosen state types and Kahan summation."""

    kahan: bool = True
    """Compensate the rounding of weights in low precision."""
    momentum_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the first state."""
    variance_dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Type of the second state."""

    def build_optimizer(self, groups: list[dict[str, Any]], ctx: Any) -> torch.optim.Optimizer:
        return AnyPrecisionAdamW(
            clean(groups),
            lr=ctx.args.learning_rate,
            betas=(ctx.args.adam_beta1, ctx.args.adam_beta2),
            eps=ctx.args.adam_epsilon,
            kahan=self.kahan,
            momentum_dtype=DTYPES[self.momentum_dtype],
            variance_dtype=DTYPES[self.variance_dtype],
        )

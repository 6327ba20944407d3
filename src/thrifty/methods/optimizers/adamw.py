"""AdamW.

What it does: adapts the step of every weight to running means of its gradient and squared gradient, and decays matrices
(not biases and normalisations) independently of the gradient.

Helps: nearly always; it is the reference that the other optimizers are compared with.
Does not help: memory: two states, 8 bytes, a parameter.
Limits: none.
Source: Loshchilov and Hutter, "Decoupled Weight Decay Regularization", ICLR 2019.
Library: torch.optim.AdamW.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

from thrifty.method import Method, Paper, register
from thrifty.methods.optimizers._groups import clean


@register(
    "adamw",
    title="AdamW",
    section="optimizers",
    sources=[Paper("Loshchilov and Hutter", 2019, "arXiv:1711.05101")],
    exact=True,
    claims=("optimizer",),
    preset={"implementation": "loop"},
    library="torch.optim",
    choices={"free": [{"implementation": "fused"}, {"implementation": "foreach"}]},
)
@dataclass(kw_only=True)
class AdamW(Method):
    """AdamW with the decay groups of the trainer. Learning rate, betas, epsilon and decay default to those of the
    run."""

    betas: tuple[float, float] | None = None
    """Decay of the two running means; None takes `adam_beta1` and `adam_beta2`."""
    eps: float | None = None
    """Added to the denominator; None takes `adam_epsilon`."""
    implementation: Literal["fused", "foreach", "loop"] = "fused"
    """One kernel for the step, one for each operation, or one for each tensor. The mathematics is the same."""

    def build_optimizer(self, groups: list[dict[str, Any]], ctx: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(
            clean(groups),
            lr=ctx.args.learning_rate,
            betas=self.betas or (ctx.args.adam_beta1, ctx.args.adam_beta2),
            eps=ctx.args.adam_epsilon if self.eps is None else self.eps,
            fused=True if self.implementation == "fused" else None,
            foreach={"foreach": True, "loop": False}.get(self.implementation),
        )

"""AdamW in one kernel.

What it does: computes the whole AdamW step in one kernel (fused), or each of its operations in one kernel for all
parameters (foreach), in place of some ten kernels for each parameter. The mathematics is the same.

Helps: models of many small tensors on GPUs, where launching kernels takes longer than the kernels.
Does not help: memory; foreach even needs a copy of the parameters for the time of the step.
Limits: torch's fused step runs on CPU, CUDA, MPS and XPU devices.
Source: PyTorch's multi-tensor and fused optimizers, 2023; NVIDIA apex, 2019.
Library: torch.optim.AdamW.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

from thrifty.method import Method, Paper, register
from thrifty.methods.optimizers._groups import clean


@register(
    "adamw-fused",
    title="AdamW in one kernel",
    section="optimizers",
    sources=[Paper("PyTorch", 2023, "torch.optim"), Paper("NVIDIA", 2019, "apex.optimizers.FusedAdam")],
    exact=True,
    claims=("optimizer",),
    preset={"kernels": "foreach"},
    library="torch.optim",
    choices={"free": [{}]},
)
@dataclass(kw_only=True)
class AdamWFused(Method):
    """AdamW with few kernels. Learning rate, betas, epsilon and decay are those of the run."""

    kernels: Literal["fused", "foreach"] = "fused"
    """One kernel for the step, or one for each of its operations."""

    def build_optimizer(self, groups: list[dict[str, Any]], ctx: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(
            clean(groups),
            lr=ctx.args.learning_rate,
            betas=(ctx.args.adam_beta1, ctx.args.adam_beta2),
            eps=ctx.args.adam_epsilon,
            **{self.kernels: True},
        )

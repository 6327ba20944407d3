"""Offloading of the optimizer.

What it does: keeps AdamW's states and the float32 weights in the host's memory and updates them there; the device holds
weights and gradients only, and sends and receives each of them once a step. The update may run while the device
computes the next step, whose result it then comes after.

Helps: when optimizer states (8 bytes a parameter, 12 with 16-bit weights) do not fit on the device.
Does not help: with adapters, which have few states; or with a slow host, which a step then waits for.
Limits: AdamW only. With `delayed`, from `warmup_steps` on each update uses the gradient of the step before, and the
last one is not applied: not the same mathematics. On a CPU the host is the device (emulated): nothing is saved.
Source: Ren et al., "ZeRO-Offload: Democratizing Billion-Scale Model Training", USENIX ATC 2021.
Library: torch.optim's fused AdamW, on the host.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from thrifty.method import Method, Paper, register
from thrifty.methods.offload._host_adamw import HostAdamW, NothingOnDevice
from thrifty.methods.optimizers._groups import clean


@register(
    "optimizer-offload",
    title="Optimizer offloading",
    section="offload",
    sources=[Paper("Ren et al.", 2021, "arXiv:2101.06840")],
    exact=True,
    claims=("optimizer",),
    library="torch.optim",
    choices={"accelerator": [{}]},
    bench_order=47,
    emulated={"cpu": "the host is the device, so nothing is saved"},
)
@dataclass(kw_only=True)
class OptimizerOffload(Method):
    """AdamW on the host."""

    delayed: bool = False
    """Let the device go on with the next step while the host updates."""
    warmup_steps: int = 100
    """With `delayed`: so many steps at the beginning wait for their update, while gradients change fast."""

    def __post_init__(self) -> None:
        if self.warmup_steps < 0:
            raise ValueError(f"warmup_steps must not be negative, got {self.warmup_steps}")

    def build_optimizer(self, groups: list[dict[str, Any]], ctx: Any) -> torch.optim.Optimizer:
        if ctx.planning and ctx.device_kind != "cpu":
            return NothingOnDevice(clean(groups), lr=ctx.args.learning_rate)
        return HostAdamW(
            clean(groups),
            lr=ctx.args.learning_rate,
            betas=(ctx.args.adam_beta1, ctx.args.adam_beta2),
            eps=ctx.args.adam_epsilon,
            delay_after=self.warmup_steps if self.delayed else None,
        )

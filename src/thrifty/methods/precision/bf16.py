"""bf16 mixed precision.

What it does: runs matrix products in bfloat16 and keeps weights, reductions and the loss in float32. Its exponent
range is that of float32, so no loss scaling is needed.

Helps: on hardware with bf16 matrix units (NVIDIA Ampere and later, recent CPUs with AMX or AVX512-BF16, TPUs):
faster, and half the activation memory.
Does not help: on devices that emulate bf16 (most CPUs, NVIDIA before Ampere), where it is slower than float32.
Limits: 8 bits of mantissa: keep the weights in float32, as this method does.
Source: Kalamkar et al., "A Study of BFLOAT16 for Deep Learning Training", 2019.
Library: torch.autocast through accelerate.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from thrifty.method import Method, NotApplicable, Paper, register


def bf16_supported(device: torch.device) -> bool:
    """Can the device compute in bfloat16 at all?"""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return device.type in ("cpu", "xpu", "mps")


def bf16_autocast(device: torch.device | str) -> torch.autocast:
    """The context for one's own loop: `with bf16_autocast("cuda"): loss = model(**batch).loss`."""
    return torch.autocast(torch.device(device).type, dtype=torch.bfloat16)


@register(
    "bf16",
    title="bf16 mixed precision",
    section="precision",
    sources=[Paper("Kalamkar et al.", 2019, "arXiv:1905.12322")],
    exact=False,
    micro_batch_invariant=False,
    claims=("precision",),
    library="torch.amp",
    choices={"allow": [{}]},
    bench_order=10,
)
@dataclass(kw_only=True)
class BF16(Method):
    """Mixed precision in bfloat16."""

    def configure(self, args: Any, ctx: Any) -> dict[str, Any]:
        if not ctx.planning and not bf16_supported(ctx.device):
            raise NotApplicable(
                f"bf16: the device {torch.cuda.get_device_name(ctx.device)} has no bfloat16 units",
                fix="use fp16, or no precision method",
            )
        return {"bf16": True}

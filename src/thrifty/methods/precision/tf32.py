"""TF32 matrix products.

What it does: rounds the inputs of float32 matrix products to 10 bits of mantissa and accumulates in float32. Nothing
else changes: weights, activations and memory stay as they are.

Helps: on NVIDIA Ampere and later when a model must stay in float32: up to three times the matrix throughput.
Does not help: together with bf16 or fp16, whose products do not run in float32; on any device without TF32 units.
Limits: CUDA with compute capability 8.0 or higher.
Source: NVIDIA, "Accelerating AI Training with NVIDIA TF32 Tensor Cores", 2021; Hugging Face's single-GPU guide.
Library: torch.backends.cuda.matmul.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from thrifty.method import Method, NotApplicable, Paper, register


def tf32_supported() -> bool:
    """Is there a CUDA device with TF32 units?"""
    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= 8


def enable_tf32() -> None:
    """Switches TF32 on for one's own loop.

    Uses the one API for it: mixing it with `allow_tf32` or `get_float32_matmul_precision` raises in torch.
    """
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    torch.backends.cudnn.conv.fp32_precision = "tf32"  # pyright: ignore[reportAttributeAccessIssue]


def round_to_tf32(x: torch.Tensor) -> torch.Tensor:
    """What the tensor core does to its inputs: rounds float32 to 10 bits of mantissa, to nearest. Any shape."""
    x = x.float().contiguous()
    rounded = ((x.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)
    return torch.where(x.isnan(), x, rounded)  # rounding up could turn the bits of a NaN into those of a number


@register(
    "tf32",
    title="TF32 matrix products",
    section="precision",
    sources=[Paper("NVIDIA", 2021, "TF32 Tensor Cores"), Paper("Hugging Face", 2024, "single-GPU guide")],
    exact=False,
    micro_batch_invariant=False,
    library="torch.backends.cuda",
    choices={"allow": [{}]},
    bench_order=5,
)
@dataclass(kw_only=True)
class TF32(Method):
    """Float32 matrix products on TF32 units."""

    def configure(self, args: Any, ctx: Any) -> dict[str, Any]:
        if not ctx.planning and not (ctx.device.type == "cuda" and tf32_supported()):
            raise NotApplicable(
                f"tf32: the device '{ctx.device}' has no TF32 units (NVIDIA Ampere or later has)",
                fix="remove tf32 from the methods",
            )
        return {"tf32": True}

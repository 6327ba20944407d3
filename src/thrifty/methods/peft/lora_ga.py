"""LoRA-GA (low-rank adaptation with gradient approximation).

What it does: LoRA that starts from the singular vectors of the full gradient on a few batches, so that the first steps
change the weights as full fine-tuning would. The base is compensated, so the function is unchanged at the start.

Helps: fine-tuning that should converge like full fine-tuning: two to four times faster than LoRA by its authors.
Does not help: long runs, or data whose first batches say little about the rest.
Limits: the gradients of all adapted weights are held once, before training, so that moment needs as much memory as
plain training without optimizer. Checkpoints hold the adapter of the changed base; only the finished one, of rank 2 r,
fits the original base.
Source: Wang, Yu and Li, "LoRA-GA: Low-Rank Adaptation with Gradient Approximation", NeurIPS 2024.
Library: peft (its own start multiplies B by the singular values of the gradient and leaves A as it is, other than the
paper, so it is computed here).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from thrifty.method import Batch, Paper, register
from thrifty.methods.peft._adapters import CONFLICTS
from thrifty.methods.peft._compensated import CompensatedLora, start_from


def base_gradients(model: nn.Module, layers: dict[str, Any], batches: Sequence[Batch]) -> dict[str, Tensor]:
    """The mean gradient of the loss over batches for the frozen weight (out, in) of each LoRA layer.

    The adapters must hold zero. Dropout is off, so that the same batches give the same start.
    """
    weights = [layer.get_base_layer().weight for layer in layers.values()]
    was_training = model.training
    model.eval()
    total: list[Tensor] = [torch.zeros_like(weight, dtype=torch.float32) for weight in weights]
    for weight in weights:
        weight.requires_grad_(True)
    try:
        for batch in batches:
            with torch.enable_grad():
                gradients = torch.autograd.grad(model(**batch).loss, weights)
            for mean, gradient in zip(total, gradients, strict=True):
                mean.add_(gradient.float(), alpha=1 / len(batches))
    finally:
        for weight in weights:
            weight.requires_grad_(False)
        model.train(was_training)
    return {
        name: mean.T if layer.fan_in_fan_out else mean
        for (name, layer), mean in zip(layers.items(), total, strict=True)
    }


def gradient_start(gradient: Tensor, r: int, gamma: float) -> tuple[Tensor, Tensor]:
    """A (r, in) and B (out, r) for a gradient (out, in): right vectors 1..r and left vectors r+1..2r.

    Both are scaled by out^(1/4) / sqrt(gamma), which keeps the size of the outputs whatever the width.
    """
    u, _, v = torch.linalg.svd(gradient, full_matrices=False)
    scale = gradient.shape[0] ** 0.25 / gamma**0.5
    return scale * v[:r], scale * u[:, r : 2 * r]


@register(
    "lora-ga",
    title="LoRA-GA",
    section="peft",
    sources=[Paper("Wang, Yu and Li", 2024, "arXiv:2407.05000")],
    exact=False,
    # The start comes from batches of the run's own size.
    micro_batch_invariant=False,
    claims=("adapter",),
    conflicts_with=CONFLICTS,
    library="peft",
    preset={"r": 2, "alpha": 4, "batches": 2},
)
@dataclass(kw_only=True)
class LoraGa(CompensatedLora):
    """LoRA that starts along the gradient; scaled by alpha / sqrt(r) as rsLoRA."""

    batches: int = 8
    """Micro-batches that the gradient is taken from."""
    gamma: float = 16.0
    """Stability: a larger one starts from smaller adapters."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.batches < 1:
            raise ValueError(f"batches must be at least 1, got {self.batches}")
        if self.gamma <= 0:
            raise ValueError(f"gamma must be above 0, got {self.gamma}")

    def lora_settings(self) -> dict[str, Any]:
        return {"use_rslora": True}

    def vectors_needed(self) -> int:
        return 2 * self.r

    def start(self, layers: dict[str, LoraLayer], model: PeftModel, ctx: Any) -> None:
        model.to(ctx.device)
        gradients = base_gradients(model, layers, ctx.batches(self.batches, model))
        for name, layer in layers.items():
            start_from(layer, *gradient_start(gradients.pop(name), self.r, self.gamma))

"""Gradient accumulation.

What it does: adds up the gradients of several micro-batches before one optimizer step. The loss is divided by the
number of target tokens of all of them, on all processes, so that the result is that of the large batch.

Helps: when the batch you want does not fit: memory is that of one micro-batch.
Does not help: speed; a larger micro-batch is faster where it fits.
Limits: methods that update the weights during backward cannot be combined with it.
Source: folklore; the normalisation by tokens was settled in transformers 4.46 (2024).
Library: transformers.Trainer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from thrifty.method import Method, Paper, register


def accumulate(
    micro_batches: Sequence[dict[str, Any]],
    summed_loss: Callable[[dict[str, Any]], Tensor],
    count: Callable[[dict[str, Any]], int],
    backward: Callable[[Tensor], None] = Tensor.backward,
) -> Tensor:
    """Accumulates the gradients of several micro-batches as if they were one batch, for one's own loop.

    Args:
        micro_batches: The batches of one optimizer step.
        summed_loss: Gives the loss of a micro-batch, *summed* over its targets.
        count: Gives the number of targets of a micro-batch.
        backward: For accelerate: `accelerator.backward`.

    Returns:
        The mean loss over all targets, without graph.
    """
    targets = sum(count(batch) for batch in micro_batches)
    total = torch.zeros(())
    for batch in micro_batches:
        loss = summed_loss(batch) / targets
        backward(loss)
        total = total + loss.detach().cpu()
    return total


@register(
    "gradient-accumulation",
    title="Gradient accumulation",
    section="data_loading",
    sources=[Paper("Hugging Face", 2024, "single-GPU guide")],
    exact=True,
    library="transformers",
    preset={"steps": 2},
)
@dataclass(kw_only=True)
class GradientAccumulation(Method):
    """Several micro-batches an optimizer step."""

    steps: int = 4
    """Micro-batches an optimizer step."""

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"steps must be at least 1, got {self.steps}")

    def configure(self, args: Any, ctx: Any) -> dict[str, Any]:
        return {"gradient_accumulation_steps": self.steps}

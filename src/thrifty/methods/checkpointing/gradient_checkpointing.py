"""Gradient (activation) checkpointing.

What it does: keeps only the inputs of the Transformer blocks in the forward pass and computes everything inside them
again in the backward pass. The random state is restored for it, so gradients are the same with dropout.

Helps: when activations are the peak of memory: long sequences, large batches, deep models.
Does not help: when weights, optimizer states or the logits are the peak; it costs about one more forward pass.
Limits: models without Hugging Face's checkpointing support are refused.
Source: Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016; Griewank and Walther, 2000.
Library: torch.utils.checkpoint through transformers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import nn

from thrifty._hf import checkpointing_arguments, enable_checkpointing
from thrifty.architecture import find_blocks
from thrifty.method import Method, NotApplicable, Paper, register


def checkpoint_blocks(model: nn.Module, *, every: int = 1) -> int:
    """Switches checkpointing on for every `every`-th block of a Hugging Face model, for one's own loop.

    Returns:
        The number of checkpointed blocks.
    """
    enable_checkpointing(model, {"use_reentrant": False})
    return keep_every(model, every)


def keep_every(model: nn.Module, every: int) -> int:
    """Of the checkpointed blocks keeps the first of each group of `every` checkpointed. Returns how many there are."""
    kept = 0
    for blocks in find_blocks(model):
        block: Any
        for index, block in enumerate(blocks):
            if getattr(block, "gradient_checkpointing", None) is not None:
                block.gradient_checkpointing = index % every == 0
                kept += index % every == 0
    return kept


@register(
    "gradient-checkpointing",
    title="Gradient checkpointing",
    section="checkpointing",
    sources=[Paper("Chen et al.", 2016, "arXiv:1604.06174"), Paper("Griewank and Walther", 2000, "Algorithm 799")],
    exact=True,
    library="torch.utils.checkpoint",
    choices={"free": [{}, {"every": 2}]},
    bench_order=40,
)
@dataclass(kw_only=True)
class GradientCheckpointing(Method):
    """Recomputes activations in the backward pass."""

    every: int = 1
    """Checkpoint every n-th block only: less recomputation, more memory."""

    checkpointed: int = field(default=0, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ValueError(f"every must be at least 1, got {self.every}")

    def configure(self, args: Any, ctx: Any) -> dict[str, Any]:
        return checkpointing_arguments(True, {"use_reentrant": False})

    def prepare_model(self, model: nn.Module, ctx: Any) -> nn.Module:
        if not getattr(model, "supports_gradient_checkpointing", False):
            raise NotApplicable(
                f"gradient-checkpointing: {type(model).__name__} does not support checkpointing",
                fix="remove gradient-checkpointing from the methods",
            )
        return model

    def on_train_begin(self, args: Any, state: Any, control: Any, **kw: Any) -> None:
        self.checkpointed = keep_every(kw["model"], self.every)

    def on_replace(self, model: nn.Module, parameter_map: Any, ctx: Any) -> None:
        self.checkpointed = keep_every(model, self.every)

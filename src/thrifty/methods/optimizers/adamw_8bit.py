"""AdamW with 8-bit states.

What it does: stores AdamW's two running means in one byte each, in blocks that are scaled by their largest entry and
mapped to a code book that is dense near zero. Every step reads, updates and rounds them.

Helps: memory: 2 bytes a parameter for the states instead of 8, with AdamW's settings.
Does not help: models whose weights and activations take most of the memory.
Limits: tensors below `min_size` elements and embeddings keep 32-bit states, or training becomes unstable. On CUDA the
kernels of bitsandbytes run; elsewhere the same arithmetic in plain torch, which takes more time.
Source: Dettmers et al., "8-bit Optimizers via Block-wise Quantization", ICLR 2022.
Library: bitsandbytes (extra quant) on CUDA.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from thrifty.method import Method, Paper, register
from thrifty.methods.optimizers._groups import refuse_sharding
from thrifty.methods.optimizers._quantised import (
    Codec,
    Implementation,
    QuantisedAdamW,
    bitsandbytes_groups,
    quantised_groups,
    use_library,
)

BLOCKWISE_8BIT = Codec(bits=8, block=256)


@register(
    "adamw-8bit",
    title="AdamW with 8-bit states",
    section="optimizers",
    sources=[Paper("Dettmers et al.", 2022, "arXiv:2110.02861")],
    exact=False,
    # A rounding threshold makes a larger step of the last bits of a gradient.
    micro_batch_invariant=False,
    claims=("optimizer",),
    preset={"min_size": 16},
    library="bitsandbytes",
    extra="quant",
    choices={"allow": [{}]},
)
@dataclass(kw_only=True)
class AdamW8bit(Method):
    """AdamW with one byte for each state. Learning rate, betas, epsilon and decay are those of the run."""

    min_size: int = 4096
    """Tensors with fewer elements keep 32-bit states."""
    implementation: Implementation = "auto"
    """library: the kernels of bitsandbytes; torch: the same in plain torch; auto: the kernels on CUDA."""

    def __post_init__(self) -> None:
        if self.min_size < 0:
            raise ValueError(f"min_size must not be negative, got {self.min_size}")

    def configure(self, args: Any, ctx: Any) -> dict[str, Any]:
        refuse_sharding(self.name, args)
        use_library(self.implementation, self.name, "bitsandbytes", ctx)
        return {}

    def build_optimizer(self, groups: list[dict[str, Any]], ctx: Any) -> torch.optim.Optimizer:
        parts = quantised_groups(groups, ctx.model)
        settings = {
            "lr": ctx.args.learning_rate,
            "betas": (ctx.args.adam_beta1, ctx.args.adam_beta2),
            "eps": ctx.args.adam_epsilon,
        }
        if use_library(self.implementation, self.name, "bitsandbytes", ctx):
            from bitsandbytes.optim import AdamW8bit as Library

            return Library(bitsandbytes_groups(parts), min_8bit_size=self.min_size, **settings)
        return QuantisedAdamW(parts, BLOCKWISE_8BIT, min_size=self.min_size, **settings)

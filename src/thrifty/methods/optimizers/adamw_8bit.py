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

from thrifty.method import Paper, register
from thrifty.methods.optimizers._quantised import (
    Codec,
    Implementation,
    SmallStates,
    adam_settings,
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
class AdamW8bit(SmallStates):
    """AdamW with one byte for each state. Learning rate, betas, epsilon and decay are those of the run."""

    implementation: Implementation = "auto"
    """library: the kernels of bitsandbytes; torch: the same in plain torch; auto: the kernels on CUDA."""

    def configure(self, args: Any, ctx: Any) -> dict[str, Any]:
        use_library(self.implementation, self.name, "bitsandbytes", ctx)
        return super().configure(args, ctx)

    def library_class(self) -> Any:
        """The optimizer of bitsandbytes."""
        from bitsandbytes.optim import AdamW8bit

        return AdamW8bit

    def build_optimizer(self, groups: list[dict[str, Any]], ctx: Any) -> torch.optim.Optimizer:
        if not use_library(self.implementation, self.name, "bitsandbytes", ctx):
            return self.adamw(groups, BLOCKWISE_8BIT, ctx)
        parts = bitsandbytes_groups(quantised_groups(groups, ctx.model))
        return self.library_class()(parts, min_8bit_size=self.min_size, **adam_settings(ctx))

"""Lion with an 8-bit state.

What it does: Lion, whose one state, the momentum, is stored in one byte a parameter, in blocks that are scaled by their
largest entry and mapped to a code book that is dense near zero.

Helps: memory: 1 byte a parameter for the state, where AdamW takes 8.
Does not help: with AdamW's learning rate: set it 3 to 10 times smaller and the weight decay as much larger.
Limits: tensors below `min_size` elements and embeddings keep 32-bit states. A momentum that is rounded to zero still
moves its weight by the sign of the next gradient. On CUDA the kernels of bitsandbytes run.
Source: Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023; Dettmers et al., 2022.
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
    QuantisedLion,
    SmallStates,
    bitsandbytes_groups,
    quantised_groups,
    use_library,
)


@register(
    "lion-8bit",
    title="Lion with an 8-bit state",
    section="optimizers",
    sources=[Paper("Chen et al.", 2023, "arXiv:2302.06675"), Paper("Dettmers et al.", 2022, "arXiv:2110.02861")],
    exact=False,
    micro_batch_invariant=False,
    claims=("optimizer",),
    preset={"min_size": 16},
    library="bitsandbytes",
    extra="quant",
)
@dataclass(kw_only=True)
class Lion8bit(SmallStates):
    """Sign updates with one byte a weight. Learning rate and weight decay are those of the run."""

    betas: tuple[float, float] = (0.9, 0.99)
    """Interpolation for the update, and decay of the momentum; the paper's language models use (0.95, 0.98)."""
    implementation: Implementation = "auto"
    """library: the kernels of bitsandbytes; torch: the same in plain torch; auto: the kernels on CUDA."""

    def __post_init__(self) -> None:
        if not all(0 <= beta <= 1 for beta in self.betas):
            raise ValueError(f"betas are two numbers between 0 and 1, got {list(self.betas)}")
        super().__post_init__()

    def configure(self, args: Any, ctx: Any) -> dict[str, Any]:
        use_library(self.implementation, self.name, "bitsandbytes", ctx)
        return super().configure(args, ctx)

    def build_optimizer(self, groups: list[dict[str, Any]], ctx: Any) -> torch.optim.Optimizer:
        parts = quantised_groups(groups, ctx.model)
        settings: dict[str, Any] = {"lr": ctx.args.learning_rate, "betas": self.betas}
        if use_library(self.implementation, self.name, "bitsandbytes", ctx):
            from bitsandbytes.optim import Lion8bit as Library

            return Library(bitsandbytes_groups(parts), min_8bit_size=self.min_size, **settings)
        return QuantisedLion(parts, Codec(bits=8, block=256), min_size=self.min_size, **settings)

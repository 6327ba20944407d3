"""AdamW with fp8 states.

What it does: stores AdamW's two running means as 8-bit floating-point numbers (e4m3), in blocks of 256 that are scaled
by their largest entry.

Helps: memory: 2 bytes a parameter for the states instead of 8.
Does not help: more than adamw-8bit does, whose code book keeps small entries better.
Limits: tensors below `min_size` elements and embeddings keep 32-bit states. Plain torch: a step takes more time than a
fused kernel's. Runs on any device: the states are converted, and no product is taken in fp8.
Source: Peng et al., "FP8-LM: Training FP8 Large Language Models", 2023.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from thrifty.method import Paper, register
from thrifty.methods.optimizers._quantised import Codec, SmallStates


@register(
    "adamw-fp8",
    title="AdamW with fp8 states",
    section="optimizers",
    sources=[Paper("Peng et al.", 2023, "arXiv:2310.18313")],
    exact=False,
    # A rounding threshold makes a larger step of the last bits of a gradient.
    micro_batch_invariant=False,
    claims=("optimizer",),
    preset={"min_size": 16},
)
@dataclass(kw_only=True)
class AdamWFp8(SmallStates):
    """AdamW with an fp8 number for each state. Learning rate, betas, epsilon and decay are those of the run."""

    def build_optimizer(self, groups: list[dict[str, Any]], ctx: Any) -> torch.optim.Optimizer:
        return self.adamw(groups, Codec(bits=8, block=256, kind="fp8"), ctx)

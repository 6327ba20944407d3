"""AdamW with 4-bit states.

What it does: stores AdamW's two running means in half a byte each, in blocks of 128 that are scaled by their largest
entry: the first with a code book that is dense near zero, the second with an even one without zero.

Helps: memory: 1 byte a parameter for the states instead of 8.
Does not help: where the last bit of quality counts: it rounds eight times as coarsely as 8-bit states do.
Limits: tensors below `min_size` elements and embeddings keep 32-bit states. Plain torch: a step takes more time than a
fused kernel's. The code books are those of torchao.
Source: Li, Chen and Zhu, "Memory Efficient Optimizers with 4-bit States", NeurIPS 2023.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from thrifty.method import Paper, register
from thrifty.methods.optimizers._quantised import Codec, SmallStates


@register(
    "adamw-4bit",
    title="AdamW with 4-bit states",
    section="optimizers",
    sources=[Paper("Li, Chen and Zhu", 2023, "arXiv:2309.01507")],
    exact=False,
    # A rounding threshold makes a larger step of the last bits of a gradient.
    micro_batch_invariant=False,
    claims=("optimizer",),
    preset={"min_size": 16},
)
@dataclass(kw_only=True)
class AdamW4bit(SmallStates):
    """AdamW with half a byte for each state. Learning rate, betas, epsilon and decay are those of the run."""

    def build_optimizer(self, groups: list[dict[str, Any]], ctx: Any) -> torch.optim.Optimizer:
        return self.adamw(groups, Codec(bits=4, block=128), ctx)

"""Lion.

What it does: updates every weight by the sign of an interpolation between momentum and gradient. It keeps one state a
weight where AdamW keeps two.

Helps: memory (4 bytes a parameter less than AdamW), and sometimes speed to a loss at large batch sizes.
Does not help: with AdamW's learning rate: set it 3 to 10 times smaller and the weight decay as much larger. Kaddour
et al. (2023) saw no gain over a fully decayed AdamW at a fixed budget.
Limits: none known beyond tuning.
Source: Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023.
Library: lion-pytorch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from lion_pytorch import Lion as LionOptimizer

from thrifty.method import Method, Paper, register


def lion(
    params: Iterable[Any], lr: float = 1e-4, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0
) -> torch.optim.Optimizer:
    """Builds the optimizer for one's own loop. Decay is decoupled and scaled by the learning rate, as in the paper."""
    return LionOptimizer(params, lr=lr, betas=betas, weight_decay=weight_decay, decoupled_weight_decay=False)  # type: ignore[arg-type]


@register(
    "lion",
    title="Lion",
    section="optimizers",
    sources=[Paper("Chen et al.", 2023, "arXiv:2302.06675")],
    exact=False,
    claims=("optimizer",),
    library="lion-pytorch",
    choices={"allow": [{}]},
    bench_order=61,
)
@dataclass(kw_only=True)
class Lion(Method):
    """Sign updates with one state a weight. Learning rate and weight decay are those of the run."""

    betas: tuple[float, float] = (0.9, 0.99)
    """Interpolation for the update, and decay of the momentum; the paper's language models use (0.95, 0.98)."""

    def __post_init__(self) -> None:
        if len(self.betas) != 2 or not all(0 <= beta <= 1 for beta in self.betas):
            raise ValueError(f"betas are two numbers between 0 and 1, got {list(self.betas)}")

    def build_optimizer(self, groups: list[dict[str, Any]], ctx: Any) -> torch.optim.Optimizer:
        clean = [{key: value for key, value in group.items() if key != "names"} for group in groups]
        return lion(clean, lr=ctx.args.learning_rate, betas=self.betas)

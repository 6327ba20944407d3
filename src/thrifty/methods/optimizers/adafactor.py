"""Adafactor.

What it does: keeps row and column means of the squared gradient of a matrix in place of one number a weight, clips the
update, and has no momentum.

Helps: memory: the states of an m x n matrix are m + n numbers.
Does not help: speed of convergence; it often needs more steps than AdamW.
Limits: biases and other vectors keep a full second moment.
Source: Shazeer and Stern, "Adafactor: Adaptive Learning Rates with Sublinear Memory Cost", ICML 2018.
Library: torch.optim.Adafactor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from thrifty.method import Method, Paper, register
from thrifty.methods.optimizers._groups import clean


@register(
    "adafactor",
    title="Adafactor",
    section="optimizers",
    sources=[Paper("Shazeer and Stern", 2018, "arXiv:1804.04235")],
    exact=False,
    claims=("optimizer",),
    library="torch.optim",
    choices={"allow": [{}]},
    bench_order=60,
)
@dataclass(kw_only=True)
class Adafactor(Method):
    """Factored second moments. The learning rate is that of the run, relative to the size of each tensor."""

    clipping: float = 1.0
    """Largest root mean square of an update before the learning rate."""

    def build_optimizer(self, groups: list[dict[str, Any]], ctx: Any) -> torch.optim.Optimizer:
        return torch.optim.Adafactor(clean(groups), lr=ctx.args.learning_rate, d=self.clipping)

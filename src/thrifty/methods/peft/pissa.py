"""PiSSA (principal singular values and vectors adaptation).

What it does: LoRA that starts from the largest singular values and vectors of each weight; what is left of the weight
is frozen. The function is unchanged at the start.

Helps: fine-tuning that should converge faster than LoRA, which starts from noise and zero.
Does not help: where the start-up counts: each weight is decomposed once (`iterations` makes that fast and inexact).
Limits: checkpoints hold the adapter of the changed base; only the finished one, of rank 2 r, fits the original base.
Weights in 16 bits are rounded once more by the decomposition.
Source: Meng et al., "PiSSA: Principal Singular Values and Singular Vectors Adaptation of Large Language Models",
NeurIPS 2024.
Library: peft.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer

from thrifty.method import Paper, register
from thrifty.methods.peft._adapters import CONFLICTS
from thrifty.methods.peft._compensated import ADAPTER, CompensatedLora


@register(
    "pissa",
    title="PiSSA",
    section="peft",
    sources=[Paper("Meng et al.", 2024, "arXiv:2404.02948")],
    exact=False,
    claims=("adapter",),
    conflicts_with=CONFLICTS,
    library="peft",
    preset={"r": 2, "alpha": 4},
)
@dataclass(kw_only=True)
class Pissa(CompensatedLora):
    """Trains the principal part of each weight in place of a correction to it."""

    iterations: int | None = None
    """Steps of a randomised decomposition, e.g. 4 or 16; None is the exact one."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.iterations is not None and self.iterations < 1:
            raise ValueError(f"iterations must be at least 1, got {self.iterations}")

    def start(self, layers: dict[str, LoraLayer], model: PeftModel, ctx: Any) -> None:
        kind = "pissa" if self.iterations is None else f"pissa_niter_{self.iterations}"
        with torch.no_grad():
            for layer in layers.values():
                layer.pissa_init(ADAPTER, kind)

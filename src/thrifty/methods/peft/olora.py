"""OLoRA (orthonormal low-rank adaptation).

What it does: LoRA that starts from the QR decomposition of each weight: B holds the first columns of Q, which are
orthonormal, and A the first rows of R. What is left of the weight is frozen, so the function is unchanged.

Helps: fine-tuning that should converge faster than LoRA, at a start-up cost below PiSSA's.
Does not help: once training is long enough for LoRA to catch up.
Limits: the first columns of a weight are no better than others, so the start depends on the order of the units.
Checkpoints hold the adapter of the changed base; only the finished one, of rank 2 r, fits the original base.
Source: Büyükakyüz, "OLoRA: Orthonormal Low-Rank Adaptation of Large Language Models", 2024.
Library: peft (its own start does not work on GPT-2's transposed weights, so it is computed here).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer

from thrifty.method import Paper, register
from thrifty.methods.peft._adapters import CONFLICTS
from thrifty.methods.peft._compensated import CompensatedLora, dense_weight, start_from


@register(
    "olora",
    title="OLoRA",
    section="peft",
    sources=[Paper("Büyükakyüz", 2024, "arXiv:2406.01775")],
    exact=False,
    claims=("adapter",),
    conflicts_with=CONFLICTS,
    library="peft",
    preset={"r": 2, "alpha": 4},
)
@dataclass(kw_only=True)
class Olora(CompensatedLora):
    """LoRA that starts from an orthonormal basis."""

    def start(self, layers: dict[str, LoraLayer], model: PeftModel, ctx: Any) -> None:
        for layer in layers.values():
            q, r = torch.linalg.qr(dense_weight(layer))
            start_from(layer, r[: self.r], q[:, : self.r])

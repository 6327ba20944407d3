"""rsLoRA (rank-stabilised LoRA).

What it does: LoRA with the scale alpha / sqrt(r) in place of alpha / r, so that neither the adapters' output nor their
gradient fades as the rank grows.

Helps: ranks of 32 and more, where plain LoRA learns no better than at rank 8.
Does not help: small ranks: at r = 8 it is LoRA with a scale 2.8 times as large, which a learning rate does as well.
Limits: those of LoRA. A learning rate tuned for LoRA is too high.
Source: Kalajdzievski, "A Rank Stabilization Scaling Factor for Fine-Tuning with LoRA", 2023.
Library: peft.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from thrifty.method import Paper, register
from thrifty.methods.peft._adapters import CONFLICTS, LoraFamily


@register(
    "rslora",
    title="rsLoRA",
    section="peft",
    sources=[Paper("Kalajdzievski", 2023, "arXiv:2312.03732")],
    exact=False,
    claims=("adapter",),
    conflicts_with=CONFLICTS,
    library="peft",
    preset={"r": 2, "alpha": 4},
)
@dataclass(kw_only=True)
class RsLora(LoraFamily):
    """LoRA whose scale suits any rank: here the product is multiplied by alpha / sqrt(r)."""

    def lora_settings(self) -> dict[str, Any]:
        return {"use_rslora": True}

"""DoRA (weight-decomposed low-rank adaptation).

What it does: splits each weight into the norms of its rows and their directions; LoRA adapts the directions, and the
norms are trained beside it.

Helps: fine-tuning at small ranks, where it comes closer to full fine-tuning than LoRA.
Does not help: where time is short: the norm of the adapted weight is computed in every step.
Limits: those of LoRA; the norm is held constant in the backward pass, as the paper does. Merging rounds to the
precision of the weights.
Source: Liu et al., "DoRA: Weight-Decomposed Low-Rank Adaptation", ICML 2024.
Library: peft.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from thrifty.method import Paper, register
from thrifty.methods.peft._adapters import CONFLICTS, LoraFamily


@register(
    "dora",
    title="DoRA",
    section="peft",
    sources=[Paper("Liu et al.", 2024, "arXiv:2402.09353")],
    exact=False,
    claims=("adapter",),
    conflicts_with=CONFLICTS,
    library="peft",
    preset={"r": 2, "alpha": 4},
)
@dataclass(kw_only=True)
class Dora(LoraFamily):
    """LoRA for the directions of the weights, and a trained norm for each row."""

    def lora_settings(self) -> dict[str, Any]:
        return {"use_dora": True}

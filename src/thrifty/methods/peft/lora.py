"""LoRA (low-rank adaptation).

What it does: freezes the model and trains the product of two thin matrices beside each linear layer. At the end the
product is added into the weights, and the adapter is kept beside them in peft's own format.

Helps: fine-tuning a model whose gradients and optimizer states do not fit: they shrink to those of the adapters.
Does not help: pre-training, or learning much that is new; activations are still needed, so memory at long sequences
stays.
Limits: needs a pre-trained model to be useful. Merging rounds to the precision of the weights.
Source: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", ICLR 2022.
Library: peft.
"""

from __future__ import annotations

from dataclasses import dataclass

from thrifty.method import Paper, register
from thrifty.methods.peft._adapters import CONFLICTS, LoraFamily, add_lora

__all__ = ["Lora", "add_lora"]


@register(
    "lora",
    title="LoRA",
    section="peft",
    sources=[Paper("Hu et al.", 2022, "arXiv:2106.09685")],
    exact=False,
    claims=("adapter",),
    conflicts_with=CONFLICTS,
    library="peft",
    preset={"r": 2, "alpha": 4},
    choices={"allow": [{}, {"r": 32, "alpha": 64}]},
    bench_order=80,
)
@dataclass(kw_only=True)
class Lora(LoraFamily):
    """Trains low-rank adapters in place of the weights."""

"""BitFit (bias-term fine-tuning).

What it does: freezes the model and trains its biases only (and the head of a classifier).

Helps: fine-tuning encoders on small data: a tenth of a per cent of the parameters, no new ones, nothing to merge.
Does not help: large data, where full fine-tuning and LoRA do better.
Limits: a model without biases gets them, starting at zero, where its configuration can say so (Llama); elsewhere it is
refused.
Source: Ben Zaken et al., "BitFit: Simple Parameter-efficient Fine-tuning for Transformer-based Masked Language-models",
ACL 2022.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from thrifty.architecture import LINEAR, find_blocks
from thrifty.method import Method, NotApplicable, Paper, register
from thrifty.methods.peft._adapters import CONFLICTS, refuse_adapters
from thrifty.methods.peft._heads import head_of

# Configuration keys under which a model family has biases in its blocks, and the layers that they speak of.
_BIAS_KEYS = {
    "attention_bias": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "mlp_bias": ("gate_proj", "up_proj", "down_proj"),
}


def add_biases(model: nn.Module) -> bool:
    """Adds zero biases to the blocks of a model whose configuration has keys for them. Was there anything to add?"""
    config: Any = model.config
    absent = [key for key in _BIAS_KEYS if getattr(config, key, None) is False]
    if absent != list(_BIAS_KEYS):
        return False
    for blocks in find_blocks(model):
        for name, module in blocks.layers.named_modules():
            if name.endswith(tuple(leaf for key in absent for leaf in _BIAS_KEYS[key])):
                weight: Any = module.weight
                module.bias = nn.Parameter(torch.zeros(len(weight), dtype=weight.dtype, device=weight.device))
    for key in absent:
        setattr(config, key, True)
    return True


def train_biases(model: nn.Module, *, head: bool = True) -> list[str]:
    """Freezes all but the biases (and the head of a classifier), for one's own loop.

    Args:
        model: A Hugging Face model.
        head: Train a classifier's head too.

    Returns:
        The names of the trained parameters.

    Raises:
        NotApplicable: The model has no biases, and its configuration has no keys for them.
    """
    has_biases = any(
        isinstance(m, LINEAR) and m.bias is not None for b in find_blocks(model) for m in b.layers.modules()
    )
    if not has_biases and not add_biases(model):
        raise NotApplicable(
            f"bitfit: {type(model).__name__} has no biases and its configuration has no key for them",
            fix="lora or ia3",
        )
    trained = {name for name, _ in model.named_parameters() if name.endswith("bias")}
    if head and (found := head_of(model)) is not None:
        trained |= {f"{found}.{name}" for name, _ in model.get_submodule(found).named_parameters()}
    for name, p in model.named_parameters():
        p.requires_grad_(name in trained)
    return sorted(trained)


@register(
    "bitfit",
    title="BitFit",
    section="peft",
    sources=[Paper("Ben Zaken et al.", 2022, "arXiv:2106.10199")],
    exact=False,
    claims=("adapter",),
    conflicts_with={**CONFLICTS, "muon": "it makes the updates of matrices orthogonal, and only biases are trained"},
)
@dataclass(kw_only=True)
class BitFit(Method):
    """Trains biases only."""

    head: bool = True
    """Train a classifier's head too: it is new in most fine-tuning."""

    def prepare_model(self, model: nn.Module, ctx: Any) -> nn.Module:
        refuse_adapters(model, "bitfit")
        train_biases(model, head=self.head)
        return model

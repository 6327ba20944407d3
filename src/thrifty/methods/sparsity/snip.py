"""SNIP (single-shot pruning at initialisation).

What it does: looks at a few batches before training, keeps the connections whose removal would change the loss most,
|gradient x weight|, over all layers together, and trains the rest as a fixed sparse network.

Helps: a sparse model from one ordinary run, without pruning rounds.
Does not help: speed or memory on dense hardware: zeros are multiplied like other numbers. At extreme sparsity whole
layers can vanish; SynFlow avoids that.
Limits: linear layers inside the blocks only: not embeddings, norms, biases or the head.
Source: Lee, Ajanthan and Torr, "SNIP: Single-shot Network Pruning based on Connection Sensitivity", ICLR 2019.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from thrifty.method import Paper, register
from thrifty.methods.sparsity._masks import MaskedMethod, MaskedWeights, check_sparsity, keep_best
from thrifty.methods.sparsity._samples import WeightedBatch, sample_batches, scoring


def snip_scores(
    model: nn.Module, parameters: Mapping[str, nn.Parameter], batches: Sequence[WeightedBatch]
) -> dict[str, Tensor]:
    """The connection sensitivities |dL/dc| for masks c at 1, which is |gradient * weight|; they sum to 1.

    Args:
        model: Returns an output with `loss`.
        parameters: The weights by name.
        batches: With the share of each; see `weighted_batches`. Signed gradients are added before the absolute value.
    """
    total = [torch.zeros_like(p, dtype=torch.promote_types(p.dtype, torch.float32)) for p in parameters.values()]
    with scoring(model):
        for batch, share in batches:
            gradients = torch.autograd.grad(model(**batch).loss, list(parameters.values()))
            for sum_, gradient in zip(total, gradients, strict=True):
                sum_.add_(gradient, alpha=share)
    scores = [(g * p.detach()).abs() for g, p in zip(total, parameters.values(), strict=True)]
    norm = torch.stack([score.sum() for score in scores]).sum()
    return {name: score / norm for name, score in zip(parameters, scores, strict=True)}


@register(
    "snip",
    title="SNIP",
    section="sparsity",
    sources=[Paper("Lee, Ajanthan and Torr", 2019, "arXiv:1810.02340")],
    exact=False,
    claims=("mask",),
    preset={"sparsity": 0.5, "samples": 4},
)
@dataclass(kw_only=True)
class Snip(MaskedMethod):
    """Prunes once before training by connection sensitivity."""

    sparsity: float = 0.8
    """Share of zeros over the blocks' linear weights."""
    samples: int = 128
    """Training samples that the scores are computed on."""

    def __post_init__(self) -> None:
        check_sparsity(self.sparsity)
        if self.samples < 1:
            raise ValueError(f"samples must be at least 1, got {self.samples}")

    def choose(self, model: nn.Module, parameters: dict[str, nn.Parameter], ctx: Any) -> MaskedWeights:
        scores = snip_scores(model.to(ctx.device), parameters, sample_batches(model, self.samples, ctx))
        size = sum(p.numel() for p in parameters.values())
        return MaskedWeights(parameters, keep_best(scores, round((1 - self.sparsity) * size)))

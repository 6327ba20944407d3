"""GraSP (gradient signal preservation).

What it does: looks at a few batches before training, removes the connections whose removal reduces the norm of the
gradient least (or raises it), by a Hessian-gradient product, and trains the rest as a fixed sparse network.

Helps: a very sparse model from one ordinary run, where scores by the loss alone (SNIP) starve the gradient.
Does not help: speed or memory on dense hardware: zeros are multiplied like other numbers. At moderate sparsity it is
no better than SNIP.
Limits: linear layers inside the blocks only. Scoring differentiates twice, so it runs attention without fused kernels
and takes several times the memory of a backward pass on one batch.
Source: Wang, Zhang and Grosse, "Picking Winning Tickets Before Training by Preserving Gradient Flow", ICLR 2020.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from thrifty.method import NotApplicable, Paper, register
from thrifty.methods.sparsity._masks import MaskedMethod, MaskedWeights, check_sparsity, keep_best
from thrifty.methods.sparsity._samples import WeightedBatch, sample_batches, scoring


def grasp_scores(
    model: nn.Module,
    parameters: Mapping[str, nn.Parameter],
    batches: Sequence[WeightedBatch],
    temperature: float = 200.0,
) -> dict[str, Tensor]:
    """The scores -weight * (H g): the larger, the less is lost with the connection.

    Args:
        model: Returns an output with `loss`.
        parameters: The weights by name.
        batches: With the share of each; see `weighted_batches`.
        temperature: The logits are divided by it.

    Raises:
        NotApplicable: The layer that makes the logits is not found, and the temperature is not 1.
    """
    weights = list(parameters.values())
    total = [torch.zeros_like(p) for p in weights]
    product = [torch.zeros_like(p, dtype=torch.promote_types(p.dtype, torch.float32)) for p in weights]
    with scoring(model), _softer(model, temperature):
        for batch, share in batches:
            for sum_, gradient in zip(total, torch.autograd.grad(model(**batch).loss, weights), strict=True):
                sum_.add_(gradient, alpha=share)
        # The first gradient is a constant from here on: only its product with the second one is differentiated.
        for batch, share in batches:
            gradients = torch.autograd.grad(model(**batch).loss, weights, create_graph=True)
            flow = torch.stack([(g * t).sum() for g, t in zip(gradients, total, strict=True)]).sum()
            for sum_, part in zip(product, torch.autograd.grad(flow, weights), strict=True):
                sum_.add_(part, alpha=share)
    return {name: -p.detach() * hg for (name, p), hg in zip(parameters.items(), product, strict=True)}


@contextlib.contextmanager
def _softer(model: Any, temperature: float) -> Iterator[None]:
    """Inside, the logits are divided by the temperature."""
    if temperature == 1.0:
        yield
        return
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    for name in ("classifier", "score", "lm_head"):
        head = head if head is not None else getattr(model, name, None)
    if head is None:
        raise NotApplicable(
            f"grasp: the layer that makes the logits of {type(model).__name__} is not found",
            key="methods.grasp.temperature",
            value=temperature,
            fix="set it to 1",
        )
    handle = head.register_forward_hook(lambda module, inputs, output: output / temperature)
    try:
        yield
    finally:
        handle.remove()


@register(
    "grasp",
    title="GraSP",
    section="sparsity",
    sources=[Paper("Wang, Zhang and Grosse", 2020, "arXiv:2002.07376")],
    exact=False,
    claims=("mask",),
    preset={"sparsity": 0.5, "samples": 4},
)
@dataclass(kw_only=True)
class Grasp(MaskedMethod):
    """Prunes once before training so that the gradient keeps its norm."""

    sparsity: float = 0.8
    """Share of zeros over the blocks' linear weights."""
    samples: int = 128
    """Training samples that the scores are computed on."""
    temperature: float = 200.0
    """The logits are divided by it while scores are computed."""

    def __post_init__(self) -> None:
        check_sparsity(self.sparsity)
        if self.samples < 1:
            raise ValueError(f"samples must be at least 1, got {self.samples}")
        if self.temperature <= 0:
            raise ValueError(f"temperature must be positive, got {self.temperature}")

    def choose(self, model: nn.Module, parameters: dict[str, nn.Parameter], ctx: Any) -> MaskedWeights:
        batches = sample_batches(model, self.samples, ctx)
        scores = grasp_scores(model.to(ctx.device), parameters, batches, self.temperature)
        size = sum(p.numel() for p in parameters.values())
        kept = keep_best({name: -score for name, score in scores.items()}, round((1 - self.sparsity) * size))
        return MaskedWeights(parameters, kept)

"""Prototype data pruning.

What it does: groups the samples by k-means in the model's own embedding space and scores each by its distance to the
nearest centre, the prototype. It trains on the far ones (hard, when data is plentiful) or the near ones (easy, when it
is scarce).

Helps: large data sets with many alike samples, without any label; a fifth of ImageNet could go without loss.
Does not help: with an untrained model, whose embeddings mean nothing (set steps, or give a pre-trained model).
Limits: it needs a forward pass over all samples. Keeping the hard ones of little data is worse than chance.
Source: Sorscher et al., "Beyond neural scaling laws: beating power law scaling via data pruning", NeurIPS 2022.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from thrifty.method import Batch, NotApplicable, Paper, register
from thrifty.methods.selection._scoring import LABELLED, ScorePruning, batches_of, early_model


def kmeans(points: Tensor, clusters: int, rng: torch.Generator, rounds: int = 100) -> tuple[Tensor, Tensor]:
    """Spherical k-means: cosine similarity, centres on the unit sphere.

    A centre that loses all its points moves to the point that is farthest from its own.

    Args:
        points: Shape (n, width).
        clusters: At most n.
        rng: Chooses the first centres (k-means++).
        rounds: The most rounds.

    Returns:
        Centres of shape (clusters, width), of length 1, and the nearest one of each point, shape (n,).
    """
    unit = nn.functional.normalize(points.double(), dim=1)
    centres = unit[torch.randint(len(unit), (1,), generator=rng)]
    while len(centres) < clusters:
        distance = (1 - unit @ centres.T).clamp(min=0).amin(1)
        weights = distance if float(distance.sum()) > 0 else torch.ones_like(distance)
        centres = torch.cat([centres, unit[torch.multinomial(weights, 1, generator=rng)]])
    nearest = torch.full((len(unit),), -1)
    for _ in range(rounds):
        similarity = unit @ centres.T
        before, nearest = nearest, similarity.argmax(1)
        if torch.equal(before, nearest):
            break
        sums = torch.zeros_like(centres).index_add_(0, nearest, unit)
        empty = torch.bincount(nearest, minlength=clusters) == 0
        if bool(empty.any()):
            own = similarity.gather(1, nearest[:, None])[:, 0]
            sums[empty] = unit[own.argsort(stable=True)[: int(empty.sum())]]
        centres = nn.functional.normalize(sums, dim=1)
    return centres, nearest


def prototype_distances(points: Tensor, clusters: int, rng: torch.Generator) -> Tensor:
    """Cosine distance of each point to the nearest of `clusters` prototypes, float64 of shape (n,)."""
    centres, _ = kmeans(points, clusters, rng)
    return (1 - nn.functional.normalize(points.double(), dim=1) @ centres.T).amin(1).clamp(min=0)


@torch.no_grad()
def embeddings(model: nn.Module, batch: Batch) -> Tensor:
    """The mean of each sample's last hidden states, padding left out, shape (batch, width)."""
    out: Any = model(**{key: v for key, v in batch.items() if key != "sample_id"}, output_hidden_states=True)
    hidden = getattr(out, "encoder_last_hidden_state", None)
    hidden = out.hidden_states[-1] if hidden is None else hidden
    mask = batch.get("attention_mask")
    if mask is None or mask.shape != hidden.shape[:2]:
        return hidden.float().mean(1)
    return (hidden.float() * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)


@register(
    "prototypes",
    title="Prototype data pruning",
    section="selection",
    sources=[Paper("Sorscher et al.", 2022, "arXiv:2206.14486")],
    exact=False,
    claims=("pruning",),
    tasks=LABELLED,
    preset={"clusters": 3},
)
@dataclass(kw_only=True)
class Prototypes(ScorePruning):
    """Keeps the samples far from, or near to, their prototype."""

    clusters: int = 10
    """Prototypes; about the number of classes, where there are classes."""
    keep: Literal["hard", "easy"] = "hard"
    """hard keeps those far from their prototype, easy those near to it."""
    steps: int = 0
    """Optimizer steps that the model that embeds is trained before; 0 takes the model as it is given."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.clusters < 1:
            raise ValueError(f"clusters must be at least 1, got {self.clusters}")
        if self.keep not in ("hard", "easy"):
            raise ValueError(f"keep must be hard or easy, got {self.keep!r}")
        if self.steps < 0:
            raise ValueError(f"steps must not be negative, got {self.steps}")

    def scoring(self, ctx: Any) -> dict[str, Any]:
        return {"clusters": self.clusters, "steps": self.steps}

    def compute(self, dataset: Any, ctx: Any) -> np.ndarray[Any, Any]:
        if len(dataset) < self.clusters:
            raise NotApplicable(
                f"prototypes: the data has {len(dataset)} samples, fewer than clusters={self.clusters}",
                fix="fewer clusters",
            )
        model = early_model(ctx, self.name, 0, self.steps, dataset, ctx.model)
        size = ctx.args.per_device_eval_batch_size
        points = torch.cat([embeddings(model, batch).cpu() for batch in batches_of(ctx, model, dataset, size)])
        return prototype_distances(points, self.clusters, ctx.rng("prototypes")).numpy()

    def choose(self, values: np.ndarray[Any, Any], count: int) -> np.ndarray[Any, Any]:
        return np.argsort(-values if self.keep == "hard" else values, kind="stable")[:count]

"""Switch Transformer.

What it does: replaces feed-forward layers by several experts, of which each token takes the one that its router
prefers, multiplied by that probability. Experts have a fixed number of places, and tokens beyond it skip the layer.

Helps: pre-training: many times the parameters at the cost of the dense model; seven times faster to a quality by its
authors, at their scale.
Does not help: small data or fine-tuning, where the experts overfit; memory, which grows with the experts.
Limits: from scratch: the experts are drawn anew. The result is another architecture: it loads with
trust_remote_code=True. The routing of a batch depends on its size, so micro-batches are not exactly one batch.
Source: Fedus et al., "Switch Transformers: Scaling to Trillion Parameter Models with Simple and Efficient Sparsity",
JMLR 2022.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from thrifty.method import Paper, register
from thrifty.methods.moe._fresh import FreshMixture
from thrifty.methods.moe._routing import CONFLICTS


@register(
    "moe-switch",
    title="Switch Transformer",
    section="moe",
    sources=[Paper("Fedus et al.", 2021, "arXiv:2101.03961")],
    exact=False,
    saves_as="remote_code",
    micro_batch_invariant=False,
    processes=False,
    claims=("feed-forward",),
    conflicts_with=CONFLICTS,
    preset={"experts": 2},
)
@dataclass(kw_only=True)
class MoeSwitch(FreshMixture):
    """One expert a token."""

    jitter: float = 0.01
    """The routers' input is multiplied by random numbers within 1 - jitter and 1 + jitter while training."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.jitter < 1:
            raise ValueError(f"jitter must be at least 0 and below 1, got {self.jitter}")

    def routing_settings(self) -> dict[str, Any]:
        return {"k": 1, "renormalise": False, "jitter": self.jitter}

    def router_std(self, width: int) -> float:
        # The paper scales all its starts by a tenth: variance 0.1 / fan-in.
        return (0.1 / width) ** 0.5

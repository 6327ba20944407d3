"""Top-2 experts (GShard, GLaM).

What it does: replaces every other feed-forward layer by several experts, of which each token takes two; their outputs
are weighted by the router's probabilities. The second one is taken at random, with twice its weight as probability.

Helps: pre-training at scale: GLaM reached GPT-3's quality with a third of the energy by its authors.
Does not help: small data or fine-tuning; memory, which grows with the experts.
Limits: from scratch: the experts are drawn anew. The result is another architecture: it loads with
trust_remote_code=True. The routing of a batch depends on its size, so micro-batches are not exactly one batch.
Source: Lepikhin et al., "GShard: Scaling Giant Models with Conditional Computation and Automatic Sharding", ICLR 2021;
Du et al., "GLaM: Efficient Scaling of Language Models with Mixture-of-Experts", ICML 2022.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from thrifty.method import Paper, register
from thrifty.methods.moe._fresh import FreshMixture
from thrifty.methods.moe._routing import CONFLICTS


@register(
    "moe-top2",
    title="Top-2 mixture of experts",
    section="moe",
    sources=[Paper("Lepikhin et al.", 2020, "arXiv:2006.16668"), Paper("Du et al.", 2021, "arXiv:2112.06905")],
    exact=False,
    saves_as="remote_code",
    micro_batch_invariant=False,
    processes=False,
    claims=("feed-forward",),
    conflicts_with=CONFLICTS,
    preset={"experts": 3},
)
@dataclass(kw_only=True)
class MoeTop2(FreshMixture):
    """Two experts a token."""

    random_second: bool = True
    """Send a token to its second expert with twice that one's weight as probability, while training."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.experts < 2:
            raise ValueError(f"experts must be at least 2, got {self.experts}")

    def routing_settings(self) -> dict[str, Any]:
        return {"k": 2, "renormalise": True, "random_second": self.random_second}

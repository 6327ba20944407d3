"""Pyramid-residual mixture of experts (PR-MoE).

What it does: keeps a dense feed-forward layer for all tokens and adds one routed expert to it; a learned pair of
weights joins the two. The deeper half of the layers has twice the experts.

Helps: the quality of two experts a token at the traffic of one, with up to three times fewer parameters by its authors.
Does not help: small data or fine-tuning; compute, which is that of two feed-forward layers where experts are.
Limits: the experts are drawn anew; the dense layer stays that of the model. The result is another architecture: it
loads with trust_remote_code=True. The routing of a batch depends on its size.
Source: Rajbhandari et al., "DeepSpeed-MoE: Advancing Mixture-of-Experts Inference and Training to Power
Next-Generation AI Scale", ICML 2022.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from thrifty.method import Paper, register
from thrifty.methods.moe._fresh import FreshMixture
from thrifty.methods.moe._routing import CONFLICTS


@register(
    "moe-residual",
    title="Pyramid-residual mixture of experts",
    section="moe",
    sources=[Paper("Rajbhandari et al.", 2022, "arXiv:2201.05596")],
    exact=False,
    saves_as="remote_code",
    micro_batch_invariant=False,
    processes=False,
    claims=("feed-forward",),
    conflicts_with=CONFLICTS,
    preset={"experts": 2, "every": 1},
)
@dataclass(kw_only=True)
class MoeResidual(FreshMixture):
    """A dense layer for all tokens and one expert for each."""

    pyramid: bool = True
    """Twice the experts in the deeper half of the layers."""

    def routing_settings(self) -> dict[str, Any]:
        return {"k": 1, "renormalise": False, "residual": True}

    def experts_of(self, position: int, sparse: list[int], count: int) -> int:
        return self.experts * (2 if self.pyramid and sparse[position] >= count / 2 else 1)

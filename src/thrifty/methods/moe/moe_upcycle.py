"""Sparse upcycling.

What it does: turns a trained dense model into a mixture of experts: every expert starts as a copy of the feed-forward
layer, a new router sends each token to two of them, and their weighted mean starts as the dense function exactly.

Helps: going on with the training of a dense model that has stopped improving at its size, at about half of the cost of
its pre-training by its authors.
Does not help: small budgets: the copies first have to become different.
Limits: a Llama or Mistral becomes a Mixtral, with experts in every layer. BERT, GPT-2 and ViT get experts in every
other layer, as in the paper, and load with trust_remote_code=True. Tokens choose experts (the paper lets the experts
of encoders choose tokens); none is dropped.
Source: Komatsuzaki et al., "Sparse Upcycling: Training Mixture-of-Experts from Dense Checkpoints", ICLR 2023.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import nn

from thrifty.architecture import main_blocks
from thrifty.method import Paper, SavesAs, register
from thrifty.methods.moe._convert import describe, to_experts
from thrifty.methods.moe._fresh import sparse_layers
from thrifty.methods.moe._layer import body
from thrifty.methods.moe._mixtral import ROUTER_STD, RecordMixtral, plan_mixtral, to_mixtral
from thrifty.methods.moe._routing import CONFLICTS, Mixture, refuse_mixture
from thrifty.remote_code import check_remote_code, write_remote_code

MIXTRAL_LIKE = ("LlamaForCausalLM", "MistralForCausalLM")


@register(
    "moe-upcycle",
    title="Sparse upcycling",
    section="moe",
    sources=[Paper("Komatsuzaki et al.", 2023, "arXiv:2212.05055")],
    exact=False,
    # The load-balance loss of a batch is not the mean of those of its parts.
    micro_batch_invariant=False,
    processes=False,
    claims=("feed-forward",),
    conflicts_with={
        **CONFLICTS,
        "section:initialization": "upcycling stands on a trained model, a new initialisation discards it",
    },
    preset={"experts": 2},
)
@dataclass(kw_only=True)
class MoeUpcycle(Mixture):
    """Turns a dense model into a mixture of experts."""

    experts: int = 8
    """Experts of a layer."""
    k: int = 2
    """Experts that a token takes."""
    every: int = 2
    """Which layers get experts: 1 all, 2 every other. A Mixtral has them in all."""

    _settings: dict[str, Any] | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        self.check_losses()
        if self.experts < 1:
            raise ValueError(f"experts must be at least 1, got {self.experts}")
        if not 1 <= self.k <= self.experts:
            raise ValueError(f"k must be between 1 and the number of experts, got {self.k}")
        if self.every < 1:
            raise ValueError(f"every must be at least 1, got {self.every}")

    @property
    def saves_as(self) -> SavesAs:
        return "plain" if self._settings is None else "remote_code"

    def prepare_model(self, model: nn.Module, ctx: Any) -> nn.Module:
        refuse_mixture(model, "moe-upcycle")
        if type(model).__name__ in MIXTRAL_LIKE:
            return self._as_mixtral(model, ctx)
        check_remote_code(model, "moe-upcycle")
        sparse = sparse_layers(len(main_blocks(model, "moe-upcycle")), self.every, "moe-upcycle")
        self._settings = describe(
            model, "moe-upcycle", sparse=sparse, experts=[self.experts] * len(sparse), k=self.k, renormalise=True
        )
        layers = to_experts(model, self._settings, copies=True, router_std=ROUTER_STD, planning=ctx.planning)
        self.follow(model, layers, self._settings["experts"], ctx)
        return model

    def _as_mixtral(self, model: Any, ctx: Any) -> nn.Module:
        mixtral: Any = to_mixtral(model, self.experts, self.k)
        mixtral.config.router_aux_loss_coef = self.aux_loss
        if ctx.planning:
            plan_mixtral(mixtral)
        gates = [layer.mlp.gate for layer in mixtral.model.layers]
        self.follow(mixtral, gates, [self.experts] * len(gates), ctx)
        assert self.routing is not None
        for gate in gates:
            gate.register_forward_hook(RecordMixtral(self.routing))
        return mixtral

    def save_files(self, model: nn.Module, folder: str, ctx: Any) -> None:
        if self._settings is not None:
            write_remote_code(folder, model, kind="moe", body=body(), settings=self._settings)

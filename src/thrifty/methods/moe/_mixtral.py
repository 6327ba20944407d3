"""Llama to Mixtral, and what a Mixtral needs to be followed and dry-run."""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import nn
from transformers import MixtralConfig, MixtralForCausalLM

from thrifty.errors import NotApplicable
from thrifty.methods.moe._convert import dense_weights
from thrifty.methods.moe._routing import Routing

ROUTER_STD = 0.02


@torch.no_grad()
def to_mixtral(model: Any, experts: int = 8, k: int = 2) -> MixtralForCausalLM:
    """A Mixtral that computes what a Llama or Mistral computes. The router draws from the global generator.

    Raises:
        NotApplicable: The Llama has biases, which a Mixtral has not.
    """
    old = model.config
    for key in ("attention_bias", "mlp_bias"):
        if getattr(old, key, False):
            raise NotApplicable("moe-upcycle: a Mixtral has no biases", key=key, value=True, fix="another base model")
    known = {key: value for key, value in old.to_dict().items() if key in MixtralConfig().to_dict()}
    for key in ("model_type", "architectures", "transformers_version"):
        known.pop(key, None)
    config = MixtralConfig(**known, num_local_experts=experts, num_experts_per_tok=k)
    config._attn_implementation = old._attn_implementation
    weight = model.get_input_embeddings().weight
    with weight.device:
        new: Any = MixtralForCausalLM(config).to(weight.dtype)
    state = {name: tensor for name, tensor in model.state_dict().items() if ".mlp." not in name}
    new.load_state_dict(state, strict=False)
    for source, target in zip(model.model.layers, new.model.layers, strict=True):
        dense = dense_weights(source, "gated")
        target.mlp.experts.gate_up_proj.copy_(dense.w_in.expand_as(target.mlp.experts.gate_up_proj))
        target.mlp.experts.down_proj.copy_(dense.w_out.expand_as(target.mlp.experts.down_proj))
        nn.init.normal_(target.mlp.gate.weight, std=ROUTER_STD)
    new.tie_weights()
    return new


def _one_expert(self: Any, hidden_states: Any, top_k_index: Any, top_k_weights: Any) -> Any:
    """The experts' work and memory without data: all copies of all tokens go through one of them."""
    k = top_k_index.shape[1]
    copies = hidden_states.repeat_interleave(k, dim=0)
    gate, up = nn.functional.linear(copies, self.gate_up_proj[0]).chunk(2, dim=-1)
    out = nn.functional.linear(self.act_fn(gate) * up, self.down_proj[0]) * top_k_weights.reshape(-1, 1)
    return out.view(len(hidden_states), k, -1).sum(1).to(hidden_states.dtype)


def plan_mixtral(model: Any) -> None:
    """Gives the experts of a Mixtral a form that can run without data."""
    for layer in model.model.layers:
        layer.mlp.experts.forward = MethodType(_one_expert, layer.mlp.experts)


class RecordMixtral:
    """A forward hook on a Mixtral's router that records its choices."""

    def __init__(self, routing: Routing) -> None:
        self.routing = routing

    def __call__(self, module: Any, inputs: Any, output: Any) -> None:
        logits, _, chosen = output
        valid = self.routing.valid(logits) if module.training else None
        wanted = torch.ones_like(chosen, dtype=torch.bool)
        wanted = wanted if valid is None else wanted & valid[:, None]
        logits = logits.float()
        self.routing.record(valid, logits, logits.softmax(dim=-1), chosen, wanted, wanted)

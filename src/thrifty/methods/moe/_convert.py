"""Finds the feed-forward layers of a model, and turns them into mixtures of experts and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from thrifty.architecture import main_blocks
from thrifty.errors import NotApplicable
from thrifty.methods.moe._layer import MoeFeedForward, change


class Dense(NamedTuple):
    """The weights of a feed-forward layer: (inner, width), (inner,), (width, inner), (width,). Gated ones stack the
    gate on the rest: (2 inner, width)."""

    w_in: Tensor
    b_in: Tensor | None
    w_out: Tensor
    b_out: Tensor | None


def layout_of(block: nn.Module, who: str) -> str:
    """How the block keeps its feed-forward layer: `gated`, `gpt2`, `plain` or `bert`.

    Raises:
        NotApplicable: In none of these ways.
    """
    mlp: Any = getattr(block, "mlp", None)
    for layout, names in (
        ("gated", ("gate_proj", "up_proj", "down_proj")),
        ("gpt2", ("c_fc", "c_proj", "dropout")),
        ("plain", ("fc1", "fc2")),
    ):
        if mlp is not None and all(isinstance(getattr(mlp, name, None), nn.Module) for name in names):
            return layout
    if hasattr(getattr(block, "intermediate", None), "dense") and hasattr(getattr(block, "output", None), "dense"):
        return "bert"
    raise NotApplicable(
        f"{who}: finds no feed-forward layer of a known form in {type(block).__name__}",
        fix="use a model family with plain feed-forward layers (Llama, GPT-2, BERT, ViT, ...)",
    )


def _linears(block: Any, layout: str) -> list[Any]:
    if layout == "bert":
        return [block.intermediate.dense, block.output.dense]
    names = {"gated": ("gate_proj", "up_proj", "down_proj"), "gpt2": ("c_fc", "c_proj"), "plain": ("fc1", "fc2")}
    return [getattr(block.mlp, name) for name in names[layout]]


def dense_weights(block: nn.Module, layout: str) -> Dense:
    """The weights of the block's feed-forward layer."""
    parts = _linears(block, layout)
    weights = [part.weight.detach().T if isinstance(part, Conv1D) else part.weight.detach() for part in parts]
    biases = [None if part.bias is None else part.bias.detach() for part in parts]
    if layout != "gated":
        return Dense(weights[0], biases[0], weights[1], biases[1])
    gate, up, _ = biases
    return Dense(
        torch.cat(weights[:2]), None if gate is None or up is None else torch.cat([gate, up]), weights[2], biases[2]
    )


def set_dense_weights(block: nn.Module, layout: str, new: Dense) -> None:
    """Gives the block's feed-forward layer these weights."""
    gate_up = new.w_in.chunk(2) if layout == "gated" else (new.w_in,)
    biases = (new.b_in.chunk(2) if layout == "gated" else (new.b_in,)) if new.b_in is not None else ()
    with torch.no_grad():
        parts = _linears(block, layout)
        for part, weight in zip(parts, [*gate_up, new.w_out], strict=True):
            part.weight.copy_(weight.T if isinstance(part, Conv1D) else weight)
        for part, bias in zip(parts, [*biases, new.b_out] if new.b_in is not None else [], strict=False):
            part.bias.copy_(bias)


def describe(
    model: nn.Module,
    who: str,
    *,
    sparse: Sequence[int],
    experts: Sequence[int],
    k: int,
    renormalise: bool,
    capacity: float | None = None,
    eval_capacity: float | None = None,
    jitter: float = 0.0,
    random_second: bool = False,
    residual: bool = False,
) -> dict[str, Any]:
    """What `change` needs to know, JSON-ready."""
    blocks = main_blocks(model, who)
    layout = layout_of(blocks.layers[0], who)
    first = dense_weights(blocks.layers[0], layout)
    config: Any = model.config
    act = next((getattr(config, key) for key in ("hidden_act", "activation_function") if hasattr(config, key)), "gelu")
    return {
        "blocks": blocks.prefix,
        "layout": layout,
        "sparse": list(sparse),
        "experts": list(experts),
        "width": first.w_out.shape[0],
        "inner": first.w_out.shape[1],
        "gated": layout == "gated",
        "bias": first.b_out is not None,
        "act": act,
        "k": k,
        "renormalise": renormalise,
        "capacity": capacity,
        "eval_capacity": eval_capacity,
        "jitter": jitter,
        "random_second": random_second,
        "residual": residual,
    }


@torch.no_grad()
def to_experts(
    model: nn.Module, settings: dict[str, Any], *, copies: bool, router_std: float, planning: bool = False
) -> list[MoeFeedForward]:
    """Turns feed-forward layers into mixtures of experts, in place.

    Args:
        model: A dense model.
        settings: From `describe`.
        copies: Every expert is a copy of the dense layer. False draws experts anew, with the spread of the dense
            weights.
        router_std: Standard deviation of the routers' weights.
        planning: Give the layers a form that can run without data.

    Returns:
        The new layers.
    """
    blocks = model.get_submodule(settings["blocks"])
    dense = [dense_weights(blocks[index], settings["layout"]) for index in settings["sparse"]]  # type: ignore[index]
    change(model, settings)
    layers = moe_layers(model)
    for layer, old in zip(layers, dense, strict=True):
        layer.planned = planning
        nn.init.normal_(layer.router.weight, std=router_std)
        pairs: list[tuple[Any, Tensor | None]] = [
            (layer.w_in, old.w_in),
            (layer.w_out, old.w_out),
            (layer.b_in, old.b_in),
            (layer.b_out, old.b_out),
        ]
        for parameter, source in pairs:
            if parameter is None or source is None:
                continue
            if copies:
                parameter.copy_(source.expand_as(parameter))
            elif source.ndim == 1:
                parameter.zero_()
            elif not planning:
                parameter.normal_(std=float(source.float().std()))
        if settings["residual"]:
            layer.shared_in.copy_(old.w_in)
            layer.shared_out.copy_(old.w_out)
            if old.b_in is not None and old.b_out is not None:
                layer.shared_b_in.copy_(old.b_in)
                layer.shared_b_out.copy_(old.b_out)
            nn.init.zeros_(layer.coefficient.weight)
            nn.init.zeros_(layer.coefficient.bias)
    return layers


def moe_layers(model: nn.Module) -> list[Any]:
    """The layers of this package, also in a model that was loaded with its modelling file."""
    return [module for module in model.modules() if type(module).__name__ == "MoeFeedForward"]

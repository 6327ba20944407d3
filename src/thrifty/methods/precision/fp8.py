"""Matrix products in fp8.

What it does: runs the large linear layers in 8-bit floating point: weights and activations in E4M3, gradients in E5M2,
each scaled by its own largest value at that moment. Weights, optimizer and everything else keep their precision.

Helps: large layers on GPUs with fp8 units (NVIDIA Ada, Hopper and later, AMD MI300), together with bf16 and compile:
the products are up to twice as fast as in bf16.
Does not help: small layers, where casting costs more than it saves; without compile. Memory stays about the same.
Limits: both dimensions of a layer must be multiples of 16; the head stays as it is. Without fp8 units it is emulated:
the numbers are those of fp8, the speed and the temporary memory are not. GPT-2's own layer class is not covered.
Source: Micikevicius et al., "FP8 Formats for Deep Learning", 2022.
Library: torchao.float8.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

from thrifty.errors import NotApplicable
from thrifty.method import Method, Paper, register

Recipe = Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"]
MULTIPLE = 16


def has_fp8_units(device: torch.device) -> bool:
    """Can the device multiply fp8 matrices?"""
    if device.type != "cuda":
        return False
    if torch.version.hip:
        return "gfx94" in torch.cuda.get_device_properties(device).gcnArchName
    return torch.cuda.get_device_capability(device) >= (8, 9)


def to_fp8(model: nn.Module, *, recipe: Recipe = "tensorwise", smallest: int = 512, emulate: bool = False) -> list[str]:
    """Makes the linear layers of a model compute in fp8, in place, for one's own loop.

    Args:
        model: Any model; its output head is left out.
        recipe: One scale for each tensor, one for each row, or rows with the weight's gradient in high precision.
        smallest: Layers with fewer inputs or outputs are left out.
        emulate: Compute with rounded values in high precision, for devices without fp8 units.

    Returns:
        The names of the layers.

    Raises:
        NotApplicable: torchao is missing, or there is no such layer.
    """
    if importlib.util.find_spec("torchao") is None:
        fix = "pip install thrifty[quant]"
        raise NotApplicable("fp8: torchao is not installed", key="methods", value="fp8", fix=fix)
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    getter: Any = getattr(model, "get_output_embeddings", lambda: None)
    head = getter()
    chosen = [
        name
        for name, module in model.named_modules()
        if type(module) is nn.Linear
        and module is not head
        and min(module.in_features, module.out_features) >= smallest
        and module.in_features % MULTIPLE == 0
        and module.out_features % MULTIPLE == 0
    ]
    if not chosen:
        raise NotApplicable(
            f"fp8: {type(model).__name__} has no linear layer (the head aside) with at least {smallest} inputs and "
            f"outputs, both multiples of {MULTIPLE}",
            key="methods.fp8.smallest",
            value=smallest,
            fix="lower it, or use bf16 alone: small layers are faster in bf16",
        )
    # Odd numbers of tokens would be refused in the product that gives the weight's gradient.
    config = dataclasses.replace(
        Float8LinearConfig.from_recipe_name(recipe), emulate=emulate, pad_inner_dim=not emulate
    )
    wanted = set(chosen)
    convert_to_float8_training(model, config=config, module_filter_fn=lambda module, name: name in wanted)
    return chosen


def from_fp8(model: nn.Module) -> int:
    """Turns the fp8 layers back into plain linear ones with the same weights; returns how many."""
    from torchao.float8.float8_linear import Float8Linear

    count = 0
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, Float8Linear):
                with torch.device("meta"):
                    plain = nn.Linear(child.in_features, child.out_features, bias=child.bias is not None)
                plain.weight, plain.bias = child.weight, child.bias
                plain.train(child.training)
                setattr(module, name, plain)
                count += 1
    return count


@register(
    "fp8",
    title="Matrix products in fp8",
    section="precision",
    sources=[Paper("Micikevicius et al.", 2022, "arXiv:2209.05433")],
    exact=False,
    micro_batch_invariant=False,
    processes=False,
    claims=("matrix-precision",),
    conflicts_with={
        "fp16": "torchao's layers compute in bf16 or float32 around the products",
        "early-bird": "its coefficients sit on the linear layers that fp8 replaces",
    },
    preset={"smallest": 16},
    library="torchao",
    extra="quant",
    choices={"allow": [{}]},
    bench_order=13,
    emulated={"cpu": "no fp8 units: the numbers are those of fp8, speed and temporary memory are not"},
)
@dataclass(kw_only=True)
class FP8(Method):
    """Linear layers in 8-bit floating point."""

    recipe: Recipe = "tensorwise"
    """One scale a tensor (fastest), one a row, or rows with the weights' gradients in high precision (most exact)."""
    smallest: int = 512
    """Layers with fewer inputs or outputs stay as they are: casting would cost more than it saves."""

    layers: list[str] = field(default_factory=list, init=False, repr=False)
    emulated: bool = field(default=False, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.smallest < MULTIPLE:
            raise ValueError(f"smallest must be at least {MULTIPLE}, got {self.smallest}")

    def prepare_model(self, model: nn.Module, ctx: Any) -> nn.Module:
        if ctx.device.type == "cuda" and not has_fp8_units(ctx.device):
            device = torch.cuda.get_device_name(ctx.device)
            raise NotApplicable(f"fp8: {device} has no fp8 units", key="methods", value="fp8", fix="use bf16")
        self.emulated = not has_fp8_units(ctx.device)
        self.layers = to_fp8(model, recipe=self.recipe, smallest=self.smallest, emulate=self.emulated)
        return model

    def finish(self, model: nn.Module, ctx: Any) -> nn.Module:
        from_fp8(model)
        return model

    def facts(self) -> dict[str, Any]:
        found: dict[str, Any] = {"layers in fp8": len(self.layers)} if self.layers else {}
        if self.emulated:
            found["emulated"] = "this device has no fp8 units, so speed and memory are not those of fp8"
        return found

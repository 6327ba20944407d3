"""LoftQ (LoRA-fine-tuning-aware quantisation).

What it does: rounds the weights of the blocks to four bits (NF4) and starts the LoRA adapters from what the rounding
loses: rounding and a singular value decomposition of the rest take turns, so that the quantised model with its
adapters starts nearer to the original than QLoRA does.

Helps: fine-tuning in four bits, most where the rounding hurts: small models and few bits.
Does not help: where the original weights fit: LoRA and PiSSA start from them exactly.
Limits: an adapter that is not merged belongs to the rounded base, which is saved beside it. `storage: dense` keeps the
rounded weights in their old data type, which saves no memory and needs no library; `4bit` needs bitsandbytes.
Source: Li et al., "LoftQ: LoRA-Fine-Tuning-Aware Quantization for Large Language Models", ICLR 2024.
Library: peft, bitsandbytes (peft's own start asks for CUDA, so it is computed here).
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from peft import PeftModel, get_peft_model_state_dict, set_peft_model_state_dict
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from thrifty.architecture import block_linears, find_blocks
from thrifty.method import Paper, register
from thrifty.methods.peft._adapters import CONFLICTS, LoraFamily, lora_layers, refuse_adapters
from thrifty.methods.peft._compensated import ADAPTER, dense_weight
from thrifty.methods.peft._four_bit import dequantised, known_as_four_bit, quantise
from thrifty.methods.peft._nf4 import round_to_nf4
from thrifty.methods.peft.qlora import merge_qlora

BASE_FOLDER = "quantised_base"


def loftq_start(weight: Tensor, r: int, steps: int) -> tuple[Tensor, Tensor, Tensor]:
    """Splits a weight (out, in) into Q, A (r, in) and B (out, r) with Q in NF4 and Q + B A near the weight.

    Of the `steps` pairs the best is returned, since the error need not fall in every turn.
    """
    weight = weight.float()
    a, b = torch.zeros(r, weight.shape[1]).to(weight), torch.zeros(weight.shape[0], r).to(weight)
    best: tuple[float, tuple[Tensor, Tensor, Tensor]] | None = None
    for _ in range(steps):
        q = round_to_nf4(weight - b @ a)
        u, s, v = torch.linalg.svd(weight - q, full_matrices=False)
        root = s[:r].sqrt()
        a, b = root[:, None] * v[:r], u[:, :r] * root
        error = float((weight - q - b @ a).norm())
        if best is None or error < best[0]:
            best = (error, (q, a, b))
    assert best is not None
    return best[1]


@torch.no_grad()
def round_base(model: PeftModel, steps: int = 5) -> None:
    """Rounds the linear layers of a model with LoRA to NF4, and starts their adapters from the error; in place."""
    adapted = {layer.get_base_layer(): layer for layer in lora_layers(model).values()}
    for blocks in find_blocks(model):
        for part in block_linears(blocks).values():
            linear: Any = part
            layer = adapted.get(linear)
            transposed = isinstance(linear, Conv1D)
            if layer is None:
                weight = linear.weight.T if transposed else linear.weight
                rounded = round_to_nf4(weight.contiguous())
            else:
                a, b = layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight
                rounded, start_a, start_b = loftq_start(dense_weight(layer), len(a), steps)
                root = layer.scaling[ADAPTER] ** 0.5
                a.copy_(start_a / root)
                b.copy_(start_b / root)
            linear.weight.copy_(rounded.T if transposed else rounded)


@torch.no_grad()
def save_base(model: PeftModel, folder: str) -> None:
    """Saves the rounded base model of an adapter, dense, as `from_pretrained` reads it."""
    base: Any = model.get_base_model()
    state = {}
    for name, tensor in base.state_dict().items():
        module_name, _, leaf = name.rpartition(".")
        if "lora_" in name or (leaf not in ("weight", "bias") and ".weight." in name):
            continue
        module: Any = base.get_submodule(module_name)
        if leaf == "weight" and hasattr(module, "original"):
            weight = dequantised(module)
            tensor = weight.T.contiguous() if module.original[0] is Conv1D else weight
        state[name.replace(".base_layer.", ".")] = tensor
    base.save_pretrained(folder, state_dict=state)


@register(
    "loftq",
    title="LoftQ",
    section="peft",
    sources=[Paper("Li et al.", 2023, "arXiv:2310.08659")],
    exact=False,
    claims=("adapter",),
    conflicts_with=CONFLICTS,
    library="peft",
    preset={"r": 2, "alpha": 4, "storage": "dense"},
)
@dataclass(kw_only=True)
class LoftQ(LoraFamily):
    """QLoRA whose adapters start from the error of the rounding."""

    steps: int = 5
    """Turns of rounding and decomposition."""
    storage: Literal["4bit", "dense"] = "4bit"
    """How the rounded weights are kept."""

    _finished: bool = field(default=False, init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.steps < 1:
            raise ValueError(f"steps must be at least 1, got {self.steps}")

    def prepare_model(self, model: nn.Module, ctx: Any) -> nn.Module:
        refuse_adapters(model, "loftq")
        adapted = self._add(model, ctx)
        if not ctx.planning:
            round_base(adapted, self.steps)
        if self.storage == "dense":
            return adapted
        state = get_peft_model_state_dict(adapted)
        base: Any = adapted.unload()  # type: ignore[operator]
        # The scales stay exact, so that weights that are in NF4 already come through unchanged.
        quantise(base, "loftq", double=False, device=None if ctx.planning else ctx.device, planning=ctx.planning)
        with known_as_four_bit(base):
            adapted = self._add(base, ctx)
        if not ctx.planning:
            set_peft_model_state_dict(adapted, state)
        return adapted

    def finish(self, model: nn.Module, ctx: Any) -> nn.Module:
        self._finished = True
        if not self.merge:
            return model
        assert isinstance(model, PeftModel)
        return merge_qlora(model) if self.storage == "4bit" else model.merge_and_unload()  # type: ignore[operator]

    def save_files(self, model: nn.Module, folder: str, ctx: Any) -> None:
        if self.merge or not self._finished:
            return
        assert isinstance(model, PeftModel)
        base = os.path.join(os.path.abspath(folder), BASE_FOLDER)
        save_base(model, base)
        path = os.path.join(folder, "adapter_config.json")
        with open(path, encoding="utf-8") as file:
            config = json.load(file)
        config["base_model_name_or_path"] = base
        with open(path, "w", encoding="utf-8") as file:
            json.dump(config, file, indent=2, sort_keys=True)

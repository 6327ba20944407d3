"""QLoRA.

What it does: keeps the frozen weights of the blocks in four bits (NF4: the quantiles of a normal distribution, with a
scale for each 64 weights that is quantised too: 4.127 bits a weight) and trains LoRA adapters on all linear layers.

Helps: fine-tuning a model whose 16-bit weights do not fit: a 7B needs 4 GB for its blocks.
Does not help: speed: every product dequantises its weight, forward and backward.
Limits: needs bitsandbytes. The adapters learn on the rounded weights, so merging adds them to those, never to the
original ones; the merged model is dense, in the data type that the base had. An adapter that is not merged belongs to
the base loaded in four bits. What a model asks to keep in full precision (T5's `wo`) stays as it is.
Source: Dettmers et al., "QLoRA: Efficient Finetuning of Quantized LLMs", NeurIPS 2023.
Library: peft, bitsandbytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from peft import PeftModel, get_peft_model_state_dict
from torch import nn

from thrifty.method import NotApplicable, Paper, register
from thrifty.methods.peft._adapters import CONFLICTS, LoraFamily, add_lora, lora_layers, refuse_adapters
from thrifty.methods.peft._four_bit import known_as_four_bit, quantise, restore

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def add_qlora(
    model: nn.Module,
    *,
    double: bool = True,
    compute_dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    planning: bool = False,
    **settings: Any,
) -> PeftModel:
    """Quantises the blocks of a Hugging Face model and adds adapters, for one's own loop.

    Args:
        model: The dense model; it is changed.
        double: Quantise the scales too.
        compute_dtype: In which products are computed; None takes that of the weights.
        device: Where the weights go as they are quantised.
        planning: Only take on the shapes and bytes.
        **settings: Those of `peft.LoraConfig`.

    Raises:
        NotApplicable: bitsandbytes is missing, or the model has no blocks.
    """
    quantise(model, "qlora", double=double, compute_dtype=compute_dtype, device=device, planning=planning)
    with known_as_four_bit(model):
        return add_lora(model, **settings)


def merge_qlora(model: PeftModel) -> nn.Module:
    """The dense model: dequantised weights plus adapters, in the data type that the weights had before."""
    changes = {
        name.removeprefix("base_model.model."): layer.get_delta_weight(str(model.active_adapter)).detach()
        for name, layer in lora_layers(model).items()
        if hasattr(layer.get_base_layer(), "original")
    }
    for layer in lora_layers(model).values():
        if not hasattr(layer.get_base_layer(), "original"):
            layer.merge()
    return restore(model.unload(), changes)  # type: ignore[operator]


@register(
    "qlora",
    title="QLoRA",
    section="peft",
    sources=[Paper("Dettmers et al.", 2023, "arXiv:2305.14314")],
    exact=False,
    claims=("adapter",),
    conflicts_with=CONFLICTS,
    library="peft, bitsandbytes",
    extra="quant",
    preset={"r": 2, "alpha": 4},
    choices={"allow": [{}, {"r": 32, "alpha": 64}]},
    bench_order=81,
)
@dataclass(kw_only=True)
class Qlora(LoraFamily):
    """LoRA on a base model in four bits."""

    double_quantisation: bool = True
    """Quantise the scales of the blocks too: 4.127 bits a weight in place of 4.5."""
    compute_dtype: Literal["bfloat16", "float16", "float32"] | None = None
    """In which products are computed; null takes the run's precision."""
    paged: bool = False
    """AdamW whose states move to the host when the device is full (bitsandbytes' `paged_adamw_32bit`)."""

    def configure(self, args: Any, ctx: Any) -> Mapping[str, Any]:
        if not self.paged:
            return {}
        owner = ctx.trainer.recipe.owner("optimizer") if ctx.trainer is not None else None
        if owner is not None:
            raise NotApplicable(
                f"qlora: paged asks for its own optimizer, and '{owner.name}' is in the list",
                key="methods.qlora.paged",
                value=True,
                fix=f"remove `paged`, or the method '{owner.name}'",
            )
        if not ctx.planning and not torch.cuda.is_available():
            raise NotApplicable(
                "qlora: pages need CUDA's unified memory", key="methods.qlora.paged", value=True, fix="remove `paged`"
            )
        return {"optim": "paged_adamw_32bit"}

    def prepare_model(self, model: nn.Module, ctx: Any) -> nn.Module:
        refuse_adapters(model, "qlora")
        device = None if ctx.planning else ctx.device
        quantise(
            model,
            "qlora",
            double=self.double_quantisation,
            compute_dtype=self._compute_dtype(ctx),
            device=device,
            planning=ctx.planning,
        )
        with known_as_four_bit(model):
            return self._add(model, ctx)

    def _compute_dtype(self, ctx: Any) -> torch.dtype | None:
        if self.compute_dtype is not None:
            return DTYPES[self.compute_dtype]
        return torch.bfloat16 if ctx.args.bf16 else torch.float16 if ctx.args.fp16 else None

    def finish(self, model: nn.Module, ctx: Any) -> nn.Module:
        if not self.merge:
            return model
        assert isinstance(model, PeftModel)
        config = model.peft_config[str(model.active_adapter)]
        state = {name: tensor.detach().cpu().clone() for name, tensor in get_peft_model_state_dict(model).items()}
        self._adapter = (config, state)
        return merge_qlora(model)

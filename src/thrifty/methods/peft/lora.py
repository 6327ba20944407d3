"""LoRA (low-rank adaptation).

What it does: freezes the model and trains the product of two thin matrices beside each linear layer. At the end the
product is added into the weights, and the adapter is kept beside them in peft's own format.

Helps: fine-tuning a model whose gradients and optimizer states do not fit: they shrink to those of the adapters.
Does not help: pre-training, or learning much that is new; activations are still needed, so memory at long sequences
stays.
Limits: needs a pre-trained model to be useful. Merging rounds to the precision of the weights.
Source: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", ICLR 2022.
Library: peft.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from safetensors.torch import save_file
from torch import nn
from transformers.pytorch_utils import Conv1D

from thrifty.method import Method, NotApplicable, Paper, SavesAs, register

ADAPTER_FOLDER = "adapter"
TASK_TYPES = {
    "causal-lm": "CAUSAL_LM",
    "seq2seq-lm": "SEQ_2_SEQ_LM",
    "text-classification": "SEQ_CLS",
}


def add_lora(model: nn.Module, **settings: Any) -> PeftModel:
    """Freezes a Hugging Face model and adds adapters, for one's own loop. Settings are those of `peft.LoraConfig`."""
    settings.setdefault("target_modules", "all-linear")
    settings.setdefault("fan_in_fan_out", any(isinstance(module, Conv1D) for module in model.modules()))
    return get_peft_model(model, LoraConfig(**settings))  # type: ignore[arg-type, return-value]


@register(
    "lora",
    title="LoRA",
    section="peft",
    sources=[Paper("Hu et al.", 2022, "arXiv:2106.09685")],
    exact=False,
    claims=("adapter",),
    conflicts_with={
        "section:initialization": "adapters stand on a pre-trained model, a new initialisation discards it",
        "section:sparsity": "sparse training changes the very weights that adapters freeze",
        "stacking": "a growing model trains its own weights, and adapters freeze them",
    },
    library="peft",
    preset={"r": 2, "alpha": 4},
    choices={"allow": [{}, {"r": 32, "alpha": 64}]},
    bench_order=80,
)
@dataclass(kw_only=True)
class Lora(Method):
    """Trains low-rank adapters in place of the weights."""

    r: int = 8
    """Rank of the adapters."""
    alpha: int = 16
    """Scale: the product is multiplied by alpha / r."""
    dropout: float = 0.0
    """Dropout on the adapters' input."""
    target_modules: str | list[str] = "all-linear"
    """Names of the linear layers that get adapters; `all-linear` is all but the head."""
    modules_to_save: list[str] | None = None
    """Modules trained in full beside the adapters, e.g. a new classification head."""
    merge: bool = True
    """Add the adapters into the weights at the end. False saves only the adapter, in peft's format."""

    _adapter: tuple[Any, dict[str, Any]] | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.r < 1:
            raise ValueError(f"r must be at least 1, got {self.r}")
        if self.alpha < 1:
            raise ValueError(f"alpha must be at least 1, got {self.alpha}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must be at least 0 and below 1, got {self.dropout}")

    @property
    def saves_as(self) -> SavesAs:
        return "plain" if self.merge else "peft"

    def prepare_model(self, model: nn.Module, ctx: Any) -> nn.Module:
        if isinstance(model, PeftModel):
            raise NotApplicable("lora: the model has adapters already", fix="pass the base model, or remove lora")
        task_type = TASK_TYPES.get(getattr(ctx.task, "name", ""))
        try:
            return add_lora(
                model,
                r=self.r,
                lora_alpha=self.alpha,
                lora_dropout=self.dropout,
                target_modules=self.target_modules,
                modules_to_save=self.modules_to_save,
                task_type=task_type,
            )
        except ValueError as error:
            raise NotApplicable(
                f"lora: {error}", key="methods.lora.target_modules", value=self.target_modules, fix="name linear layers"
            ) from error

    def finish(self, model: nn.Module, ctx: Any) -> nn.Module:
        if not self.merge:
            return model
        assert isinstance(model, PeftModel)
        config = model.peft_config[str(model.active_adapter)]
        state = {name: tensor.detach().cpu().clone() for name, tensor in get_peft_model_state_dict(model).items()}
        self._adapter = (config, state)
        return model.merge_and_unload()  # type: ignore[operator]

    def save_files(self, model: nn.Module, folder: str, ctx: Any) -> None:
        if self._adapter is None:
            return
        config, state = self._adapter
        target = os.path.join(folder, ADAPTER_FOLDER)
        os.makedirs(target, exist_ok=True)
        save_file(state, os.path.join(target, "adapter_model.safetensors"), metadata={"format": "pt"})
        config.save_pretrained(target)

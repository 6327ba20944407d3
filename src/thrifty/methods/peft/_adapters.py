"""What the adapters have in common: how they are added, merged and saved."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from safetensors.torch import save_file
from torch import nn
from transformers.pytorch_utils import Conv1D

from thrifty.method import Method, NotApplicable, SavesAs

ADAPTER_FOLDER = "adapter"
TASK_TYPES = {
    "causal-lm": "CAUSAL_LM",
    "seq2seq-lm": "SEQ_2_SEQ_LM",
    "text-classification": "SEQ_CLS",
}
CONFLICTS = {
    "section:initialization": "adapters stand on a pre-trained model, a new initialisation discards it",
    "section:sparsity": "sparse training changes the very weights that adapters freeze",
    "stacking": "a growing model trains its own weights, and adapters freeze them",
}
"""What adapters of every kind cannot be combined with."""


def task_name(model: nn.Module, ctx: Any) -> str:
    """The run's task, or the one that the model's class stands for; empty where neither says."""
    if ctx.task is not None:
        return str(getattr(ctx.task, "name", ""))
    from thrifty import tasks
    from thrifty.errors import InputError

    try:
        return tasks.infer(model).name
    except InputError:
        return ""


def has_conv1d(model: nn.Module) -> bool:
    """Does the model keep weights as (in, out), as GPT-2 does?"""
    return any(isinstance(module, Conv1D) for module in model.modules())


def refuse_adapters(model: nn.Module, who: str) -> None:
    """Raises `NotApplicable` (for the method `who`) where the model has adapters already."""
    if isinstance(model, PeftModel):
        raise NotApplicable(f"{who}: the model has adapters already", fix=f"pass the base model, or remove {who}")


def add_lora(model: nn.Module, **settings: Any) -> PeftModel:
    """Freezes a Hugging Face model and adds adapters, for one's own loop. Settings are those of `peft.LoraConfig`."""
    settings.setdefault("target_modules", "all-linear")
    settings.setdefault("fan_in_fan_out", has_conv1d(model))
    return get_peft_model(model, LoraConfig(**settings))  # type: ignore[arg-type, return-value]


def lora_layers(model: nn.Module) -> dict[str, Any]:
    """peft's LoRA layers by name."""
    return {name: module for name, module in model.named_modules() if hasattr(module, "lora_A")}


def save_adapter(folder: str, config: Any, state: dict[str, Any]) -> None:
    """Writes an adapter in peft's format."""
    os.makedirs(folder, exist_ok=True)
    save_file(state, os.path.join(folder, "adapter_model.safetensors"), metadata={"format": "pt"})
    config.save_pretrained(folder)


@dataclass(kw_only=True)
class MergedAdapter(Method):
    """An adapter in peft's format that can be merged into the weights at the end."""

    merge: bool = True
    """Add the adapter into the weights at the end. False saves only the adapter, in peft's format."""

    _adapter: tuple[Any, dict[str, Any]] | None = field(default=None, init=False, repr=False)

    @property
    def saves_as(self) -> SavesAs:
        return "plain" if self.merge else "peft"

    def finish(self, model: nn.Module, ctx: Any) -> nn.Module:
        if not self.merge:
            return model
        assert isinstance(model, PeftModel)
        config = model.peft_config[str(model.active_adapter)]
        state = {name: tensor.detach().cpu().clone() for name, tensor in get_peft_model_state_dict(model).items()}
        self._adapter = (config, state)
        return model.merge_and_unload()  # type: ignore[operator]

    def save_files(self, model: nn.Module, folder: str, ctx: Any) -> None:
        if self._adapter is not None:
            save_adapter(os.path.join(folder, ADAPTER_FOLDER), *self._adapter)


@dataclass(kw_only=True)
class LoraFamily(MergedAdapter):
    """LoRA with another scale, form or start."""

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

    def __post_init__(self) -> None:
        if self.r < 1:
            raise ValueError(f"r must be at least 1, got {self.r}")
        if self.alpha < 1:
            raise ValueError(f"alpha must be at least 1, got {self.alpha}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must be at least 0 and below 1, got {self.dropout}")

    def lora_settings(self) -> dict[str, Any]:
        """Further fields of `peft.LoraConfig`."""
        return {}

    def initialise(self, model: PeftModel, ctx: Any) -> None:
        """Gives the new adapters their start. Not called in a dry run."""

    def prepare_model(self, model: nn.Module, ctx: Any) -> nn.Module:
        refuse_adapters(model, self.name)
        adapted = self._add(model, ctx)
        if not ctx.planning:
            self.initialise(adapted, ctx)
        return adapted

    def _add(self, model: nn.Module, ctx: Any) -> PeftModel:
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
                **self.lora_settings(),
            )
        except ValueError as error:
            raise NotApplicable(
                f"{self.name}: {error}",
                key=f"methods.{self.name}.target_modules",
                value=self.target_modules,
                fix="name linear layers",
            ) from error

"""Prefix tuning.

What it does: freezes the model and trains keys and values of a few virtual tokens at every layer, which all tokens
attend to. A small network can produce them while training (`projection`), which steadies it.

Helps: generation tasks on one shared model; it reaches deeper than prompt tuning for the same number of tokens.
Does not help: small models or long training, where LoRA does better at the same size.
Limits: causal language models, sequence-to-sequence models, and text classifiers where the installed transformers still
gives them `past_key_values`, which peft asks for (newer ones call it `cache`). Gradient checkpointing cannot be
combined with it. Cannot be merged: the result is an adapter in peft's format.
Source: Li and Liang, "Prefix-Tuning: Optimizing Continuous Prompts for Generation", ACL 2021.
Library: peft.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import transformers
from peft import PeftModel, PrefixTuningConfig
from torch import nn

from thrifty.method import NotApplicable, Paper, register
from thrifty.methods.peft._adapters import CONFLICTS, TASK_TYPES
from thrifty.methods.peft._prompts import VirtualTokens


@register(
    "prefix-tuning",
    title="Prefix tuning",
    section="peft",
    sources=[Paper("Li and Liang", 2021, "arXiv:2101.00190")],
    exact=False,
    saves_as="peft",
    claims=("adapter",),
    conflicts_with={
        **CONFLICTS,
        "section:checkpointing": "a recomputed block cannot take the keys and values that stand in front of the text",
        "offload-and-recompute": "a recomputed block cannot take the keys and values in front of the text",
        "muon": "it makes the updates of the blocks' matrices orthogonal, and only the prefix is trained",
        "packing": "the keys in front of the text would belong to the first document of a row only",
        "layer-drop": "a skipped block does not take its keys and values, and later ones then read another block's",
    },
    tasks=("causal-lm", "seq2seq-lm", "text-classification"),
    library="peft",
    preset={"tokens": 3},
)
@dataclass(kw_only=True)
class PrefixTuning(VirtualTokens):
    """Trains keys and values in front of every layer's own."""

    projection: bool = False
    """Produce the prefix by a two-layer network, which is dropped after training."""
    hidden_size: int | None = None
    """Width of that network; null is the model's own."""

    _encoder: nn.Module | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.hidden_size is not None and self.hidden_size < 1:
            raise ValueError(f"hidden_size must be at least 1, got {self.hidden_size}")

    def configure(self, args: Any, ctx: Any) -> Mapping[str, Any]:
        if getattr(args, "activation_checkpointing", False) or args.gradient_checkpointing:
            raise NotApplicable(
                "prefix-tuning: a recomputed block cannot take the keys and values in front of the text",
                key="gradient_checkpointing",
                value=True,
                fix="remove one of the two",
            )
        return {}

    def peft_config(self, model: nn.Module, task_type: str) -> Any:
        if task_type == TASK_TYPES["text-classification"] and not _takes_past_keys(model):
            raise NotApplicable(
                f"prefix-tuning: peft gives a classifier its prefix as `past_key_values`, and {type(model).__name__} "
                f"has no argument of that name in transformers {transformers.__version__}",
                fix="lora, ia3 or prompt-tuning",
            )
        return PrefixTuningConfig(
            task_type=task_type,  # type: ignore[arg-type]
            num_virtual_tokens=self.tokens,
            prefix_projection=self.projection,
            encoder_hidden_size=self.hidden_size or model.config.hidden_size,  # type: ignore[union-attr, arg-type]
        )

    def prepare_model(self, model: nn.Module, ctx: Any) -> PeftModel:
        prefixed = super().prepare_model(model, ctx)
        prefixed.traced_whole = True  # type: ignore[assignment]  # one tensor holds the prefixes of all layers
        if self.projection:
            self._encoder = prefixed.prompt_encoder[str(prefixed.active_adapter)]
            self._encoder.embedding.register_load_state_dict_pre_hook(_keep_narrow_weight)  # type: ignore[union-attr]
        return prefixed

    def state_dict(self) -> dict[str, Any]:
        return {"encoder": self._encoder.state_dict()} if self._encoder is not None else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self._encoder is not None:
            self._encoder.load_state_dict(state["encoder"])


def _takes_past_keys(model: Any) -> bool:
    """What peft asks of a classifier or of the model below its head; newer ones take a `cache` in its place."""
    forwards = (m.forward for m in (model, getattr(model, "base_model", model)))
    return any("past_key_values" in inspect.signature(forward).parameters for forward in forwards)


def _keep_narrow_weight(module: Any, state: dict[str, Any], prefix: str, *rest: Any) -> None:
    """peft saves the keys and values that the network produces, from which it could not be trained further."""
    name = f"{prefix}weight"
    if name in state and state[name].shape != module.weight.shape:
        state[name] = module.weight.detach().clone()

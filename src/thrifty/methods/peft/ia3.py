"""(IA)3 (infused adapter by inhibiting and amplifying inner activations).

What it does: freezes the model and trains three vectors in each block, which scale its keys, its values and the inner
activations of its feed-forward layer. At the end they are multiplied into the weights.

Helps: fine-tuning on few examples, or many adapters of one model: it trains ten times less than LoRA.
Does not help: learning much that is new: vectors can only strengthen and weaken what the model computes already.
Limits: where queries, keys and values come from one layer (GPT-2), the queries are scaled too. Needs a learning rate
well above LoRA's.
Source: Liu et al., "Few-Shot Parameter-Efficient Fine-Tuning is Better and Cheaper than In-Context Learning", NeurIPS
2022.
Library: peft.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from peft import IA3Config, PeftModel, get_peft_model
from torch import nn

from thrifty.architecture import block_linears, branch_outputs, main_blocks
from thrifty.method import NotApplicable, Paper, register
from thrifty.methods.peft._adapters import CONFLICTS, TASK_TYPES, MergedAdapter, has_conv1d, refuse_adapters, task_name

_KEYS_AND_VALUES = re.compile(
    r"(^|\.)(k_proj|v_proj|key|value|k_lin|v_lin|k|v|c_attn|qkv|qkv_proj|query_key_value|Wqkv)$"
)


def ia3_targets(model: nn.Module) -> tuple[list[str], list[str]]:
    """Full names of the layers whose output is scaled (keys and values), and of those whose input is (feed-forward).

    Raises:
        NotApplicable: The blocks are not recognised.
    """
    blocks = main_blocks(model, "ia3")
    branches = [name for name in branch_outputs(blocks.layers[0], "ia3") if not re.search(r"(^|\.)\w*att", name)]
    scaled = [name for name in block_linears(blocks) if _KEYS_AND_VALUES.search(name)]
    feed_forward = [name for name in block_linears(blocks) if any(name.endswith(f".{index}") for index in branches)]
    feed_forward = [name for name in feed_forward if not re.search(r"\.\w*att", name.removeprefix(blocks.prefix))]
    if not scaled or not feed_forward:
        raise NotApplicable(
            f"ia3: finds no layers of keys and values, or none behind the inner activations, in "
            f"{type(blocks.layers[0]).__name__}",
            key="methods.ia3.target_modules",
            fix="name them: target_modules and feedforward_modules",
        )
    return scaled, feed_forward


def add_ia3(model: nn.Module, **settings: Any) -> PeftModel:
    """Freezes a Hugging Face model and adds the vectors, for one's own loop. Settings are those of `peft.IA3Config`."""
    if settings.get("target_modules") is None:
        scaled, feed_forward = ia3_targets(model)
        settings |= {"target_modules": scaled + feed_forward, "feedforward_modules": feed_forward}
    settings.setdefault("fan_in_fan_out", has_conv1d(model))
    return get_peft_model(model, IA3Config(**settings))  # type: ignore[arg-type, return-value]


@register(
    "ia3",
    title="(IA)3",
    section="peft",
    sources=[Paper("Liu et al.", 2022, "arXiv:2205.05638")],
    exact=False,
    claims=("adapter",),
    conflicts_with={**CONFLICTS, "muon": "it makes the updates of matrices orthogonal, and only vectors are trained"},
    library="peft",
)
@dataclass(kw_only=True)
class Ia3(MergedAdapter):
    """Trains vectors that scale keys, values and inner activations."""

    target_modules: list[str] | None = None
    """Names of all scaled layers; null finds keys, values and feed-forward layers."""
    feedforward_modules: list[str] | None = None
    """Those of `target_modules` whose input is scaled in place of their output."""
    modules_to_save: list[str] | None = None
    """Modules trained in full beside the vectors, e.g. a new classification head."""

    def __post_init__(self) -> None:
        extra = set(self.feedforward_modules or ()) - set(self.target_modules or ())
        if extra:
            raise ValueError(f"feedforward_modules must be among target_modules, got {sorted(extra)} besides")

    def prepare_model(self, model: nn.Module, ctx: Any) -> nn.Module:
        refuse_adapters(model, "ia3")
        try:
            return add_ia3(
                model,
                target_modules=self.target_modules,
                feedforward_modules=self.feedforward_modules or [],
                modules_to_save=self.modules_to_save,
                task_type=TASK_TYPES.get(task_name(model, ctx)),
            )
        except ValueError as error:
            raise NotApplicable(
                f"ia3: {error}",
                key="methods.ia3.target_modules",
                value=self.target_modules,
                fix="name linear layers of the model",
            ) from error

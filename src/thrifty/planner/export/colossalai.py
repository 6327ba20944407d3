"""A Colossal-AI booster, as a Python module that the training script imports."""

from __future__ import annotations

from typing import Any

from thrifty.planner.export.intent import Export, Intent

KEYS: dict[str, Any] = {
    "plugin": ["TorchDDPPlugin", "LowLevelZeroPlugin", "GeminiPlugin"],
    "stage": [1, 2],
    "precision": ["fp16", "bf16", "fp32"],
    "max_norm": float,
    "placement_policy": ["static", "auto"],
    "mixed_precision": ["fp16", "bf16", None],
    "enable_gradient_accumulation": bool,
}


def export(intent: Intent) -> Export:
    """`from colossalai_booster import booster, MICRO_BATCH, ACCUMULATION`."""
    missing = list(intent.missing)
    half = intent.precision if intent.precision in ("bf16", "fp16") else "fp32"
    if intent.zero_stage == 0:
        plugin, arguments = "TorchDDPPlugin", {}
    elif intent.zero_stage == 3:
        plugin = "GeminiPlugin"
        arguments: dict[str, Any] = {"precision": half, "placement_policy": "static", "max_norm": intent.max_grad_norm}
        arguments["enable_gradient_accumulation"] = intent.accumulation > 1
    else:
        plugin = "LowLevelZeroPlugin"
        arguments = {"stage": intent.zero_stage, "precision": half, "max_norm": intent.max_grad_norm}
    mixed = half if plugin == "TorchDDPPlugin" and half != "fp32" else None
    if plugin == "GeminiPlugin" and half == "fp32":
        missing.append("fully sharded training in fp32: GeminiPlugin knows fp16 and bf16")
        arguments["precision"] = "bf16"
    missing += [
        f"optimizer {intent.optimizer}, learning rate {intent.learning_rate:g}: the script",
        f"sequence length {intent.seq_len}: the script's data",
    ]
    if plugin == "TorchDDPPlugin":
        missing.append(f"gradient clipping at {intent.max_grad_norm:g}: the script")
    if intent.checkpointing:
        missing.append("gradient checkpointing: model.gradient_checkpointing_enable() in the script")
    if intent.adapter is not None:
        missing.append("the adapter: booster.enable_lora in the script")
    if intent.dtype != "float32":
        missing.append(f"weights in {intent.dtype}: the script")
    if intent.precision == "tf32":
        missing.append("TF32 products: the script")
    if intent.compiled:
        missing.append("torch.compile: the script")
    inner = ", ".join(f"{k}={v!r}" for k, v in arguments.items())
    text = (
        f"from colossalai.booster import Booster\nfrom colossalai.booster.plugin import {plugin}\n\n"
        f"MICRO_BATCH = {intent.micro_batch}\nACCUMULATION = {intent.accumulation}\n"
        f"booster = Booster(plugin={plugin}({inner}), mixed_precision={mixed!r})\n"
    )
    return Export(
        tool="colossalai", files={"colossalai_booster.py": text}, flags=["colossalai", "run", "--nproc_per_node",
        str(intent.devices)],
        missing=missing, values={"plugin": plugin, "mixed_precision": mixed, **arguments}, keys=KEYS,
        source="Colossal-AI documentation: Booster Plugins",
    )  # fmt: skip

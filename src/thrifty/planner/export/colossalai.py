"""A Colossal-AI booster, as a Python module that the training script imports."""

from __future__ import annotations

from typing import Any

from thrifty.planner.export.intent import Export, Intent

KEYS: dict[str, Any] = {
    "plugin": ["TorchDDPPlugin", "LowLevelZeroPlugin", "GeminiPlugin"],
    "mixed_precision": ["fp16", None],
    "stage": [1, 2],
    "precision": ["fp16", "bf16", "fp32"],
    "master_weights": bool,
    "max_norm": float,
    "placement_policy": ["static", "auto"],
    "enable_gradient_accumulation": bool,
}
SOURCE = "Colossal-AI 0.5.0: colossalai/booster"


def export(intent: Intent) -> Export:
    """`from colossalai_booster import make_booster, MICRO_BATCH, ACCUMULATION`, after `colossalai.launch`."""
    missing = [*intent.missing, *intent.unexpressed()]
    half = intent.precision if intent.precision in ("bf16", "fp16") else "fp32"
    mixed = None
    arguments: dict[str, Any] = {}
    if intent.zero_stage == 0:
        plugin = "TorchDDPPlugin"
        mixed = half if half == "fp16" and intent.autocast else None
        if intent.autocast and half == "bf16":
            missing.append("bfloat16 autocast: torch.autocast in the script, the booster itself has fp16 only")
        missing.append(f"gradient clipping at {intent.max_grad_norm:g}: the script")
    else:
        plugin = "GeminiPlugin" if intent.zero_stage == 3 else "LowLevelZeroPlugin"
        arguments = {"precision": half, "max_norm": intent.max_grad_norm, "master_weights": intent.dtype == "float32"}
        if half in ("bf16", "fp16") and intent.autocast:
            missing.append("autocast: the plugin keeps 16-bit weights with float32 masters, divided among the devices")
    if plugin == "LowLevelZeroPlugin":
        arguments["stage"] = intent.zero_stage
    if plugin == "GeminiPlugin":
        arguments |= {"placement_policy": "static", "enable_gradient_accumulation": intent.accumulation > 1}
        missing.append("torch's optimizers: GeminiPlugin takes those of colossalai.nn.optimizer, e.g. HybridAdam")
        if half == "fp32":
            missing.append("fully sharded training in fp32: GeminiPlugin knows fp16 and bf16")
            arguments["precision"] = "bf16"
    missing += [
        f"{intent.optimizer_words}, learning rate {intent.learning_rate:g}: the script",
        f"sequence length {intent.seq_len}: the script's data",
    ]
    if intent.checkpointing:
        every = f" of one block in {intent.checkpoint_every}" if intent.checkpoint_every > 1 else ""
        missing.append(f"gradient checkpointing{every}: model.gradient_checkpointing_enable() in the script")
    if intent.adapter is not None:
        missing.append("the adapter: booster.enable_lora in the script")
    if intent.dtype != "float32":
        missing.append(f"weights in {intent.dtype}: the script")
    if intent.precision == "tf32":
        missing.append("TF32 products: the script")
    if intent.compiled:
        missing.append("torch.compile: the script")
    inner = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
    text = (
        f"from colossalai.booster import Booster\nfrom colossalai.booster.plugin import {plugin}\n\n"
        f"MICRO_BATCH = {intent.micro_batch}\nACCUMULATION = {intent.accumulation}\n\n\n"
        f"def make_booster() -> Booster:\n"
        f"    return Booster(plugin={plugin}({inner}), mixed_precision={mixed!r})\n"
    )
    return Export(
        tool="colossalai", files={"colossalai_booster.py": text},
        flags=["colossalai", "run", "--nproc_per_node", str(intent.devices)],
        missing=missing, values={"plugin": plugin, "mixed_precision": mixed, **arguments}, keys=KEYS, source=SOURCE,
    )  # fmt: skip

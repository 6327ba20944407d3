"""A DeepSpeed configuration, `ds_config.json`."""

from __future__ import annotations

import json
from typing import Any

from thrifty.planner.export.intent import Export, Intent

KEYS: dict[str, Any] = {
    "train_batch_size": int, "train_micro_batch_size_per_gpu": int, "gradient_accumulation_steps": int,
    "gradient_clipping": float, "steps_per_print": int,
    "bf16": {"enabled": bool}, "fp16": {"enabled": bool, "loss_scale": (int, float), "initial_scale_power": int},
    "torch_autocast": {"enabled": bool, "dtype": ["bfloat16", "float16"]},
    "zero_optimization": {
        "stage": [0, 1, 2, 3], "overlap_comm": bool, "contiguous_gradients": bool, "reduce_bucket_size": int,
        "stage3_gather_16bit_weights_on_model_save": bool,
    },
    "optimizer": {
        "type": ["AdamW", "Adam", "Lion", "Muon"],
        "params": {"lr": float, "betas": list, "eps": float, "weight_decay": float, "torch_adam": bool},
    },
    "activation_checkpointing": {"partition_activations": bool, "number_checkpoints": (int, type(None))},
    "compile": {"deepcompile": bool},
}  # fmt: skip


def config(intent: Intent) -> tuple[dict[str, Any], list[str]]:
    """The configuration and what it cannot express."""
    missing = list(intent.missing)
    values: dict[str, Any] = {
        "train_batch_size": intent.global_batch,
        "train_micro_batch_size_per_gpu": intent.micro_batch,
        "gradient_accumulation_steps": intent.accumulation,
        "gradient_clipping": intent.max_grad_norm,
        "steps_per_print": 100,
        "zero_optimization": {"stage": intent.zero_stage, "overlap_comm": True, "contiguous_gradients": True},
    }
    if intent.zero_stage == 3:
        values["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True
    if intent.autocast:
        # DeepSpeed's own bf16 and fp16 keep two copies of the weights; torch autocast is what was planned.
        name = {"bf16": "bfloat16", "fp16": "float16"}[intent.precision]
        values["torch_autocast"] = {"enabled": True, "dtype": name}
    elif intent.dtype == "bfloat16":
        values["bf16"] = {"enabled": True}
        missing.append(
            "pure bfloat16: DeepSpeed keeps float32 master weights beside it, 4 bytes a parameter more than planned"
        )
    elif intent.dtype == "float16":
        values["fp16"] = {"enabled": True, "loss_scale": 0}
    if intent.optimizer in KEYS["optimizer"]["type"]:
        params = {"lr": intent.learning_rate, "betas": list(intent.betas), "weight_decay": intent.weight_decay}
        if intent.optimizer != "Lion":
            params["eps"] = intent.epsilon
        values["optimizer"] = {"type": intent.optimizer, "params": params}
    else:
        missing.append(f"the optimizer {intent.optimizer}: give it to deepspeed.initialize")
    if intent.optim not in ("adamw_torch", "adamw_torch_fused", "sgd", "adafactor"):
        missing.append(f"the optimizer's form {intent.optim}")
    if intent.checkpointing:
        missing.append("gradient checkpointing: model.gradient_checkpointing_enable() in the script")
    if intent.adapter is not None:
        missing.append("the adapter: peft.get_peft_model in the script")
    if intent.precision == "tf32":
        missing.append("TF32 products: torch.backends.cuda.matmul.fp32_precision = 'tf32' in the script")
    if intent.compiled:
        missing.append("torch.compile: engine.compile() in the script")
    return values, missing


def export(intent: Intent) -> Export:
    """`deepspeed --num_gpus N train.py --deepspeed ds_config.json`."""
    values, missing = config(intent)
    return Export(
        tool="deepspeed", files={"ds_config.json": json.dumps(values, indent=2) + "\n"},
        flags=["--num_gpus", str(intent.devices), "--deepspeed_config", "ds_config.json"], missing=missing,
        values=values,
        keys=KEYS, source="DeepSpeed Configuration JSON, deepspeed.ai/docs/config-json",
    )  # fmt: skip

"""A DeepSpeed configuration, `ds_config.json`."""

from __future__ import annotations

import json
from typing import Any

from thrifty.planner.export.intent import Export, Intent

KEYS: dict[str, Any] = {
    "train_batch_size": (int, str), "train_micro_batch_size_per_gpu": (int, str),
    "gradient_accumulation_steps": (int, str),
    "gradient_clipping": (float, str), "steps_per_print": int, "zero_allow_untested_optimizer": bool,
    "bf16": {"enabled": (bool, str)},
    "fp16": {"enabled": (bool, str), "loss_scale": (int, float), "initial_scale_power": int},
    "torch_autocast": {"enabled": bool, "dtype": ["bfloat16", "float16"]},
    "zero_optimization": {
        "stage": [0, 1, 2, 3], "overlap_comm": bool, "contiguous_gradients": bool, "reduce_bucket_size": int,
        "stage3_gather_16bit_weights_on_model_save": bool,
    },
    "optimizer": {
        "type": ["AdamW", "Lion", "SGD"],
        "params": {"lr": float, "betas": list, "eps": float, "weight_decay": float},
    },
}  # fmt: skip
SOURCE = "DeepSpeed 0.19.8: deepspeed/runtime/config.py, and deepspeed.ai/docs/config-json"


def config(intent: Intent) -> tuple[dict[str, Any], list[str]]:
    """The configuration and what it cannot express. `train_batch_size` counts all devices, the next key one."""
    missing = [*intent.missing, *intent.unexpressed()]
    values: dict[str, Any] = {
        "train_batch_size": intent.global_batch,
        "train_micro_batch_size_per_gpu": intent.micro_batch,
        "gradient_accumulation_steps": intent.accumulation,
        "gradient_clipping": intent.max_grad_norm,
        "steps_per_print": 100,
        "zero_optimization": _zero(intent),
    }
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
        missing.append("pure float16: DeepSpeed keeps float32 master weights beside it")
    if intent.optimizer in KEYS["optimizer"]["type"]:
        params: dict[str, Any] = {"lr": intent.learning_rate, "weight_decay": intent.weight_decay}
        if intent.optimizer != "SGD":
            params["betas"] = list(intent.betas)
        if intent.optimizer == "AdamW":
            params["eps"] = intent.epsilon
        values["optimizer"] = {"type": intent.optimizer, "params": params}
    else:
        missing.append(f"{intent.optimizer_words}: give it to deepspeed.initialize")
        values["zero_allow_untested_optimizer"] = True
    if intent.optimizer_settings and "optimizer" in values:
        missing.append(f"settings of {intent.optimizer_words}")
    if intent.checkpointing:
        missing.append("gradient checkpointing: model.gradient_checkpointing_enable() in the script")
    if intent.checkpoint_every > 1:
        missing.append(f"checkpointing of one block in {intent.checkpoint_every}: the script")
    if intent.adapter is not None:
        missing.append("the adapter: peft.get_peft_model in the script")
    if intent.precision == "tf32":
        missing.append("TF32 products: torch.backends.cuda.matmul.fp32_precision = 'tf32' in the script")
    if intent.compiled:
        missing.append("torch.compile: engine.compile() in the script")
    missing.append(f"sequence length {intent.seq_len}: the script's data")
    return values, missing


def integrated(intent: Intent) -> dict[str, Any]:
    """The file for tools on `transformers.Trainer`, which fills in each `auto` from its own arguments."""
    return {
        "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto", "zero_allow_untested_optimizer": True, "bf16": {"enabled": "auto"},
        "fp16": {"enabled": "auto"}, "zero_optimization": _zero(intent),
    }  # fmt: skip


def _zero(intent: Intent) -> dict[str, Any]:
    values: dict[str, Any] = {"stage": intent.zero_stage, "overlap_comm": True, "contiguous_gradients": True}
    if intent.zero_stage == 3:
        values["stage3_gather_16bit_weights_on_model_save"] = True
    return values


def export(intent: Intent) -> Export:
    """`deepspeed --num_gpus N train.py --deepspeed --deepspeed_config ds_config.json`."""
    values, missing = config(intent)
    return Export(
        tool="deepspeed", files={"ds_config.json": json.dumps(values, indent=2) + "\n"},
        flags=["--num_gpus", str(intent.devices), "--deepspeed_config", "ds_config.json"], missing=missing,
        values=values, keys=KEYS, source=SOURCE,
    )  # fmt: skip

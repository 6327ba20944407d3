"""An Axolotl configuration, `axolotl.yaml`."""

from __future__ import annotations

import json
from typing import Any

from thrifty.planner.export.deepspeed import config as deepspeed_config
from thrifty.planner.export.intent import Export, Intent

KEYS: dict[str, Any] = {
    "base_model": str, "sequence_len": int, "micro_batch_size": int, "gradient_accumulation_steps": int,
    "bf16": (bool, str), "fp16": bool, "tf32": bool, "bfloat16": bool, "float16": bool,
    "gradient_checkpointing": (bool, str),
    "optimizer": str, "learning_rate": float, "weight_decay": float, "adam_beta1": float, "adam_beta2": float,
    "adam_epsilon": float, "max_grad_norm": float, "adapter": ["lora", "qlora"], "lora_r": int, "lora_alpha": (int,
    float),
    "lora_dropout": float, "lora_target_linear": bool, "lora_target_modules": list, "torch_compile": bool,
    "sdp_attention": bool,
    "deepspeed": str, "fsdp_version": int,
    "fsdp_config": {"reshard_after_forward": bool, "auto_wrap_policy": str, "state_dict_type": str},
    "datasets": list, "output_dir": str,
}  # fmt: skip


def export(intent: Intent) -> Export:
    """`axolotl train axolotl.yaml`."""
    import yaml

    missing = [*intent.missing, "the data: fill in `datasets`"]
    half = intent.dtype == "bfloat16"
    values: dict[str, Any] = {
        "base_model": intent.model,
        "sequence_len": intent.seq_len,
        "micro_batch_size": intent.micro_batch,
        "gradient_accumulation_steps": intent.accumulation,
        "bf16": intent.precision == "bf16",
        "fp16": intent.precision == "fp16",
        "tf32": intent.precision == "tf32",
        "gradient_checkpointing": intent.checkpointing,
        "learning_rate": intent.learning_rate,
        "weight_decay": intent.weight_decay,
        "adam_beta1": intent.betas[0],
        "adam_beta2": intent.betas[1],
        "adam_epsilon": intent.epsilon,
        "max_grad_norm": intent.max_grad_norm,
        "torch_compile": intent.compiled,
        "sdp_attention": True,
        "datasets": [],
        "output_dir": "out",
    }
    if half:
        values |= {"bfloat16": True}
    files = {}
    names = {"AdamW": intent.optim, "Lion": "lion_pytorch"}
    if intent.optimizer in names or intent.optimizer in ("Adafactor", "SGD"):
        values["optimizer"] = names.get(intent.optimizer, intent.optimizer.lower())
    else:
        missing.append(f"the optimizer {intent.optimizer}")
    adapter = intent.adapter
    if adapter is not None and adapter.kind == "LORA":
        values |= {
            "adapter": "lora",
            "lora_r": adapter.rank,
            "lora_alpha": adapter.alpha,
            "lora_dropout": adapter.dropout,
        }
        values |= {"lora_target_linear": True} if adapter.all_linear else {"lora_target_modules": adapter.targets}
    elif adapter is not None:
        missing.append(f"the adapter {adapter.kind}")
    if intent.checkpoint_every > 1:
        missing.append(f"checkpointing of one block in {intent.checkpoint_every}: Axolotl checkpoints all")
    if intent.zero_stage in (1, 2):
        config, _ = deepspeed_config(intent)
        for name in ("optimizer", "steps_per_print"):
            config.pop(name, None)
        files["ds_config.json"] = json.dumps(config, indent=2) + "\n"
        values["deepspeed"] = "ds_config.json"
    if intent.zero_stage == 3:
        values["fsdp_version"] = 2
        values["fsdp_config"] = {
            "reshard_after_forward": True, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "state_dict_type": "FULL_STATE_DICT",
        }  # fmt: skip
    if intent.task != "causal-lm":
        missing.append(f"the task {intent.task}: Axolotl trains causal language models")
    files = {"axolotl.yaml": yaml.safe_dump(values, sort_keys=False), **files}
    return Export(
        tool="axolotl", files=files, flags=["train", "axolotl.yaml"], missing=missing, values=values, keys=KEYS,
        source="Axolotl documentation: Config Reference",
    )  # fmt: skip

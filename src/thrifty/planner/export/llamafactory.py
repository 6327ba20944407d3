"""A LLaMA-Factory configuration, `llamafactory.yaml`."""

from __future__ import annotations

import json
from typing import Any

from thrifty.planner.export.deepspeed import config as deepspeed_config
from thrifty.planner.export.intent import Export, Intent

KEYS: dict[str, Any] = {
    "model_name_or_path": str, "stage": ["pt", "sft"], "do_train": bool, "finetuning_type": ["full", "lora"],
    "lora_rank": int, "lora_alpha": int, "lora_dropout": float, "lora_target": str, "cutoff_len": int,
    "per_device_train_batch_size": int, "gradient_accumulation_steps": int, "learning_rate": float,
    "weight_decay": float,
    "adam_beta1": float, "adam_beta2": float, "adam_epsilon": float, "max_grad_norm": float, "optim": str, "bf16": bool,
    "fp16": bool, "tf32": bool, "pure_bf16": bool, "disable_gradient_checkpointing": bool, "flash_attn": ["auto",
    "sdpa", "fa2", "disabled"],
    "torch_compile": bool, "deepspeed": str, "output_dir": str, "dataset": str,
}  # fmt: skip


def export(intent: Intent) -> Export:
    """`llamafactory-cli train llamafactory.yaml`."""
    import yaml

    missing = [*intent.missing, "the data: fill in `dataset` and `template`"]
    pure = intent.dtype == "bfloat16"
    values: dict[str, Any] = {
        "model_name_or_path": intent.model,
        "stage": "sft",
        "do_train": True,
        "finetuning_type": "full",
        "cutoff_len": intent.seq_len,
        "per_device_train_batch_size": intent.micro_batch,
        "gradient_accumulation_steps": intent.accumulation,
        "learning_rate": intent.learning_rate,
        "weight_decay": intent.weight_decay,
        "adam_beta1": intent.betas[0],
        "adam_beta2": intent.betas[1],
        "adam_epsilon": intent.epsilon,
        "max_grad_norm": intent.max_grad_norm,
        "bf16": intent.precision == "bf16",
        "fp16": intent.precision == "fp16",
        "disable_gradient_checkpointing": not intent.checkpointing,
        "flash_attn": "sdpa",
        "dataset": "",
        "output_dir": "out",
    }
    if pure:
        values["pure_bf16"] = True
    if intent.precision == "tf32":
        values["tf32"] = True
    if intent.compiled:
        values["torch_compile"] = True
    if intent.optimizer in ("AdamW", "Adafactor", "SGD"):
        values["optim"] = intent.optim
    else:
        missing.append(f"the optimizer {intent.optimizer}")
    files = {}
    adapter = intent.adapter
    if adapter is not None and adapter.kind == "LORA":
        values |= {
            "finetuning_type": "lora", "lora_rank": adapter.rank, "lora_alpha": int(adapter.alpha or 0),
            "lora_dropout": adapter.dropout, "lora_target": "all" if adapter.all_linear else ",".join(adapter.targets),
        }  # fmt: skip
    elif adapter is not None:
        missing.append(f"the adapter {adapter.kind}")
    if intent.checkpoint_every > 1:
        missing.append(f"checkpointing of one block in {intent.checkpoint_every}: LLaMA-Factory checkpoints all")
    if intent.zero_stage:
        config, _ = deepspeed_config(intent)
        for name in ("optimizer", "steps_per_print"):
            config.pop(name, None)
        files["ds_config.json"] = json.dumps(config, indent=2) + "\n"
        values["deepspeed"] = "ds_config.json"
    if intent.task != "causal-lm":
        missing.append(f"the task {intent.task}: LLaMA-Factory trains causal language models")
    files = {"llamafactory.yaml": yaml.safe_dump(values, sort_keys=False), **files}
    return Export(
        tool="llamafactory", files=files, flags=["train", "llamafactory.yaml"], missing=missing, values=values,
        keys=KEYS,
        source="LLaMA-Factory documentation: Arguments, and its examples",
    )  # fmt: skip

"""Arguments of PaddleNLP's Trainer, as JSON."""

from __future__ import annotations

import json
from typing import Any

from thrifty.planner.export.intent import Export, Intent

KEYS: dict[str, Any] = {
    "model_name_or_path": str, "max_length": int, "per_device_train_batch_size": int,
    "gradient_accumulation_steps": int,
    "bf16": bool, "fp16": bool, "fp16_opt_level": ["O0", "O1", "O2"], "recompute": bool,
    "recompute_granularity": ["full", "full_attn"],
    "sharding": ["", "stage1", "stage2", "stage3"], "sharding_parallel_degree": int, "learning_rate": float,
    "weight_decay": float, "adam_beta1": float, "adam_beta2": float, "adam_epsilon": float, "max_grad_norm": float,
    "optim": ["adamw"], "lora": bool, "lora_rank": int, "lora_alpha": (int, float), "tensor_parallel_degree": int,
    "pipeline_parallel_degree": int, "use_flash_attention": bool,
}  # fmt: skip


def export(intent: Intent) -> Export:
    """`python -m paddle.distributed.launch run_finetune.py paddle.json`."""
    missing = list(intent.missing)
    values: dict[str, Any] = {
        "model_name_or_path": intent.model,
        "max_length": intent.seq_len,
        "per_device_train_batch_size": intent.micro_batch,
        "gradient_accumulation_steps": intent.accumulation,
        "bf16": intent.precision == "bf16",
        "fp16": intent.precision == "fp16",
        "fp16_opt_level": "O0" if intent.precision in ("fp32", "tf32") else "O1" if intent.autocast else "O2",
        "recompute": intent.checkpointing,
        "sharding": f"stage{intent.zero_stage}" if intent.zero_stage else "",
        "learning_rate": intent.learning_rate,
        "weight_decay": intent.weight_decay,
        "adam_beta1": intent.betas[0],
        "adam_beta2": intent.betas[1],
        "adam_epsilon": intent.epsilon,
        "max_grad_norm": intent.max_grad_norm,
        "tensor_parallel_degree": 1,
        "pipeline_parallel_degree": 1,
        "use_flash_attention": intent.precision in ("bf16", "fp16"),
    }
    if intent.zero_stage:
        values["sharding_parallel_degree"] = intent.devices
    if intent.checkpointing:
        values["recompute_granularity"] = "full"
        if intent.checkpoint_every > 1:
            missing.append(f"checkpointing of one block in {intent.checkpoint_every}: PaddleNLP recomputes all")
    if intent.optimizer == "AdamW":
        values["optim"] = "adamw"
    else:
        missing.append(f"the optimizer {intent.optimizer}")
    adapter = intent.adapter
    if adapter is not None and adapter.kind == "LORA":
        values |= {"lora": True, "lora_rank": adapter.rank, "lora_alpha": adapter.alpha}
        missing.append("which layers have adapters: PaddleNLP chooses by model")
    elif adapter is not None:
        missing.append(f"the adapter {adapter.kind}")
    if intent.precision == "tf32":
        missing.append("TF32 products: the environment variable NVIDIA_TF32_OVERRIDE=1")
    if intent.compiled:
        missing.append("torch.compile: paddle.jit.to_static in the script")
    return Export(
        tool="paddle", files={"paddle.json": json.dumps(values, indent=2) + "\n"}, missing=missing, values=values,
        keys=KEYS,
        flags=["--gpus", ",".join(map(str, range(intent.devices)))],
        source="PaddleNLP documentation: Trainer and LLM arguments",
    )  # fmt: skip

"""Arguments of PaddleFormers (formerly PaddleNLP), as JSON."""

from __future__ import annotations

import json
from typing import Any

from thrifty.planner.export.intent import Export, Intent

KEYS: dict[str, Any] = {
    "stage": ["SFT", "PT"], "fine_tuning": ["Full", "LoRA"], "model_name_or_path": str, "max_seq_len": int,
    "packing": bool, "per_device_train_batch_size": int, "gradient_accumulation_steps": int,
    "compute_type": ["bf16", "fp16", "float32", "nf4"], "fp16_opt_level": ["O0", "O1", "O2"],
    "amp_master_grad": bool,
    "recompute_granularity": ["full"], "recompute_method": ["uniform"], "recompute_num_layers": int,
    "sharding": ["", "stage1", "stage2", "stage3"], "sharding_parallel_size": int, "learning_rate": float,
    "weight_decay": float, "adam_beta1": float, "adam_beta2": float, "adam_epsilon": float, "max_grad_norm": float,
    "optim": ["adamw"], "lora_rank": int, "rslora": bool, "tensor_model_parallel_size": int,
    "pipeline_model_parallel_size": int, "output_dir": str,
}  # fmt: skip
SOURCE = "PaddleFormers 1.2.0: paddleformers/cli/hparams and paddleformers/trainer/training_args.py"


def export(intent: Intent) -> Export:
    """`paddleformers-cli train paddle.json`."""
    missing = [*intent.missing, *intent.unexpressed("quantization", "packing", "use_rslora"),
               "the data: `train_dataset_path` and its kin"]  # fmt: skip
    # compute_type decides bf16 and fp16, whatever these keys say.
    compute = {"bf16": "bf16", "fp16": "fp16"}.get(intent.precision, "float32")
    values: dict[str, Any] = {
        "stage": "SFT",
        "fine_tuning": "Full",
        "model_name_or_path": intent.model,
        "max_seq_len": intent.seq_len,
        "packing": intent.packing,
        "per_device_train_batch_size": intent.micro_batch,
        "gradient_accumulation_steps": intent.accumulation,
        "compute_type": compute,
        "fp16_opt_level": "O0" if compute == "float32" else "O1" if intent.autocast else "O2",
        "sharding": f"stage{intent.zero_stage}" if intent.zero_stage else "",
        "learning_rate": intent.learning_rate,
        "weight_decay": intent.weight_decay,
        "adam_beta1": intent.betas[0],
        "adam_beta2": intent.betas[1],
        "adam_epsilon": intent.epsilon,
        "max_grad_norm": intent.max_grad_norm,
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "output_dir": "out",
    }
    if values["fp16_opt_level"] == "O2":
        missing.append(f"pure {intent.dtype}: Paddle's O2 keeps float32 masters of trained weights beside it")
    if compute == "float32":
        values["amp_master_grad"] = False  # refused without 16 bits, yet on by default
        missing.append("the attention kernel: PaddleFormers' default needs 16 bits; set `_attn_implementation`")
    if intent.zero_stage:
        values["sharding_parallel_size"] = intent.devices
    if intent.checkpointing:
        values |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
        if intent.checkpoint_every > 1:
            missing.append(f"checkpointing of one block in {intent.checkpoint_every}: PaddleFormers recomputes all")
    if intent.optimizer == "AdamW":
        values["optim"] = "adamw"
        if intent.optimizer_settings:
            missing.append(f"settings of {intent.optimizer_words}")
    else:
        missing.append(intent.optimizer_words)
    _adapter(intent, values, missing)
    if intent.precision == "tf32":
        missing.append("TF32 products: the environment variable NVIDIA_TF32_OVERRIDE=1")
    if intent.compiled:
        missing.append("torch.compile: paddle.jit.to_static in the script")
    if intent.task != "causal-lm":
        missing.append(f"the task {intent.task}: PaddleFormers' command trains causal language models")
    return Export(
        tool="paddle", files={"paddle.json": json.dumps(values, indent=2) + "\n"}, missing=missing, values=values,
        keys=KEYS, flags=["train", "paddle.json"], source=SOURCE,
    )  # fmt: skip


def _adapter(intent: Intent, values: dict[str, Any], missing: list[str]) -> None:
    adapter = intent.adapter
    if adapter is None:
        return
    if adapter.kind != "LORA":
        missing.append(f"the adapter {adapter.kind}")
        return
    rooted = bool(adapter.extras.get("use_rslora"))
    values |= {"fine_tuning": "LoRA", "lora_rank": adapter.rank, "rslora": rooted}
    if intent.quantization:
        values["compute_type"] = intent.quantization
        missing.append("whether the scales of the frozen weights are quantised too")
    fixed = 4 if rooted else 2 * (adapter.rank or 0)
    if adapter.alpha != fixed:
        missing.append(f"the adapter's alpha {adapter.alpha:g}: PaddleFormers takes {fixed} here, whatever is set")
    if adapter.dropout:
        missing.append(f"the adapter's dropout {adapter.dropout:g}")
    missing.append("which layers have adapters: PaddleFormers chooses by model")

"""Keyword arguments of MosaicML Composer's `Trainer`, as YAML (the form LLM Foundry reads)."""

from __future__ import annotations

from typing import Any

from thrifty.planner.export.intent import Export, Intent

KEYS: dict[str, Any] = {
    "global_train_batch_size": int, "device_train_microbatch_size": int, "max_seq_len": int,
    "precision": ["fp32", "amp_fp16", "amp_bf16"],
    "fsdp_config": {
        "sharding_strategy": ["NO_SHARD", "SHARD_GRAD_OP", "FULL_SHARD"], "mixed_precision": ["PURE", "DEFAULT"],
        "activation_checkpointing": bool,
    },
    "optimizer": {"name": ["decoupled_adamw", "decoupled_lionw"], "lr": float, "betas": list, "eps": float,
    "weight_decay": float},
    "algorithms": {"gradient_clipping": {"clipping_type": ["norm"], "clipping_threshold": float}},
    "compile_config": dict,
}  # fmt: skip


def export(intent: Intent) -> Export:
    """For LLM Foundry, or `Trainer(**values)` without `optimizer` and `algorithms`, which are built by name."""
    import yaml

    missing = list(intent.missing)
    values: dict[str, Any] = {
        "global_train_batch_size": intent.global_batch,
        "device_train_microbatch_size": intent.micro_batch,
        "max_seq_len": intent.seq_len,
        "precision": {"bf16": "amp_bf16", "fp16": "amp_fp16"}.get(intent.precision, "fp32"),
        "algorithms": {"gradient_clipping": {"clipping_type": "norm", "clipping_threshold": intent.max_grad_norm}},
    }
    sharded = {0: "NO_SHARD", 2: "SHARD_GRAD_OP", 3: "FULL_SHARD"}
    if intent.zero_stage == 1:
        missing.append("ZeRO stage 1: Composer shards gradients too (SHARD_GRAD_OP)")
    if intent.devices > 1 or intent.checkpointing:
        values["fsdp_config"] = {
            "sharding_strategy": sharded.get(intent.zero_stage, "SHARD_GRAD_OP"),
            "mixed_precision": "DEFAULT" if intent.dtype == "float32" else "PURE",
            "activation_checkpointing": intent.checkpointing,
        }
    if intent.checkpoint_every > 1:
        missing.append(
            f"checkpointing of one block in {intent.checkpoint_every}: the model's activation_checkpointing_fn"
        )
    names = {"AdamW": "decoupled_adamw", "Lion": "decoupled_lionw"}
    if intent.optimizer in names:
        values["optimizer"] = {
            "name": names[intent.optimizer], "lr": intent.learning_rate, "betas": list(intent.betas),
            "weight_decay": intent.weight_decay * intent.learning_rate,
        }  # fmt: skip
        if intent.optimizer == "AdamW":
            values["optimizer"]["eps"] = intent.epsilon
    else:
        missing.append(f"the optimizer {intent.optimizer}")
    if intent.compiled:
        values["compile_config"] = {}
    if intent.adapter is not None:
        missing.append("the adapter: HuggingFaceModel(peft_config=...) in the script")
    if intent.dtype != "float32":
        missing.append(f"weights in {intent.dtype}: the script")
    if intent.precision == "tf32":
        missing.append("TF32 products: the script")
    return Export(
        tool="composer", files={"composer.yaml": yaml.safe_dump(values, sort_keys=False)}, missing=missing,
        values=values,
        keys=KEYS, flags=["composer", "-n", str(intent.devices), "train.py", "composer.yaml"],
        source="Composer Trainer API reference; LLM Foundry TUTORIAL",
    )  # fmt: skip

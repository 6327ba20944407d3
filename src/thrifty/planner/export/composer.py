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
SOURCE = "Composer 0.32.1: composer/trainer/trainer.py; LLM Foundry 0.22.0: TrainConfig"
_OPTIMIZERS = {"AdamW": "decoupled_adamw", "Lion": "decoupled_lionw"}


def export(intent: Intent) -> Export:
    """For LLM Foundry, or `Trainer(**values)` with optimizer, algorithms and parallelism built from their names."""
    import yaml

    missing = [*intent.missing, *intent.unexpressed(),
               "model, tokenizer, data, scheduler and duration: LLM Foundry's keys of these names"]  # fmt: skip
    values: dict[str, Any] = {
        "global_train_batch_size": intent.global_batch,
        "device_train_microbatch_size": intent.micro_batch,
        "max_seq_len": intent.seq_len,
        "precision": {"bf16": "amp_bf16", "fp16": "amp_fp16"}.get(intent.precision, "fp32"),
    }
    if intent.max_grad_norm:
        clip = {"clipping_type": "norm", "clipping_threshold": intent.max_grad_norm}
        values["algorithms"] = {"gradient_clipping": clip}
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
    if intent.optimizer in _OPTIMIZERS:
        values["optimizer"] = {
            "name": _OPTIMIZERS[intent.optimizer], "lr": intent.learning_rate, "betas": list(intent.betas),
            # Composer's decoupled decay is not multiplied by the learning rate.
            "weight_decay": intent.weight_decay * intent.learning_rate,
        }  # fmt: skip
        if intent.optimizer == "AdamW":
            values["optimizer"]["eps"] = intent.epsilon
        if intent.optimizer_settings:
            missing.append(f"settings of {intent.optimizer_words}")
    else:
        missing.append(intent.optimizer_words)
    if intent.compiled:
        values["compile_config"] = {}
    if intent.adapter is not None:
        missing.append("the adapter: HuggingFaceModel(peft_config=...), or `peft_config` of LLM Foundry's model")
    if intent.dtype != "float32":
        missing.append(f"weights in {intent.dtype}: the script")
    if intent.precision == "tf32":
        missing.append("TF32 products: the script")
    return Export(
        tool="composer", files={"composer.yaml": yaml.safe_dump(values, sort_keys=False)}, missing=missing,
        values=values, keys=KEYS, flags=["composer", "-n", str(intent.devices), "train.py", "composer.yaml"],
        source=SOURCE,
    )  # fmt: skip

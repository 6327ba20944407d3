"""A torchtitan job, as TOML."""

from __future__ import annotations

from typing import Any

from thrifty.planner.export.intent import Export, Intent

KEYS: dict[str, Any] = {
    "model": {"name": str, "flavor": str, "hf_assets_path": str},
    "training": {
        "local_batch_size": int, "global_batch_size": int, "seq_len": int, "max_norm": float,
        "dtype": ["float32", "bfloat16"], "mixed_precision_param": ["bfloat16", "float32"],
        "mixed_precision_reduce": ["float32"],
    },
    "parallelism": {
        "data_parallel_replicate_degree": int, "data_parallel_shard_degree": int,
        "fsdp_reshard_after_forward": ["default", "always", "never"],
        "tensor_parallel_degree": int, "pipeline_parallel_degree": int, "context_parallel_degree": int,
    },
    "optimizer": {"name": ["Adam", "AdamW"], "lr": float, "beta1": float, "beta2": float, "eps": float,
    "weight_decay": float,
                  "implementation": ["for-loop", "foreach", "fused"]},
    "activation_checkpoint": {"mode": ["none", "full", "selective", "memory_budget"], "selective_ac_option": str},
    "compile": {"enable": bool},
}  # fmt: skip


def export(intent: Intent) -> Export:
    """For `CONFIG_FILE=torchtitan.toml ./run_train.sh`."""
    missing = list(intent.missing)
    half = "bfloat16" if intent.precision == "bf16" else "float32"
    mode = "none" if not intent.checkpointing else "full" if intent.checkpoint_every == 1 else "selective"
    shards = intent.devices if intent.zero_stage else 1
    implementation = "foreach" if intent.optim == "adamw_torch" else "fused"
    values: dict[str, Any] = {
        "model": {"name": intent.config.model_type, "flavor": intent.model.rsplit("/", 1)[-1]},
        "training": {
            "local_batch_size": intent.micro_batch, "global_batch_size": intent.global_batch, "seq_len": intent.seq_len,
            "max_norm": intent.max_grad_norm, "dtype": "bfloat16" if intent.dtype == "bfloat16" else "float32",
            "mixed_precision_param": half, "mixed_precision_reduce": "float32",
        },
        "parallelism": {
            "data_parallel_replicate_degree": intent.devices // shards, "data_parallel_shard_degree": shards,
            "fsdp_reshard_after_forward": "always" if intent.zero_stage == 3 else "never",
            "tensor_parallel_degree": 1, "pipeline_parallel_degree": 1, "context_parallel_degree": 1,
        },
        "optimizer": {
            "name": "AdamW", "lr": intent.learning_rate, "beta1": intent.betas[0], "beta2": intent.betas[1],
            "eps": intent.epsilon, "weight_decay": intent.weight_decay, "implementation": implementation,
        },
        "activation_checkpoint": {"mode": mode},
        "compile": {"enable": intent.compiled},
    }  # fmt: skip
    if mode == "selective":
        values["activation_checkpoint"]["selective_ac_option"] = str(intent.checkpoint_every)
    missing.append("the flavor: torchtitan has its own list of sizes; check that it has one of these dimensions")
    if intent.zero_stage == 1:
        missing.append("ZeRO stage 1: FSDP2 divides gradients and weights too")
    if intent.optimizer != "AdamW":
        missing.append(f"the optimizer {intent.optimizer}")
    if intent.adapter is not None:
        missing.append("the adapter: torchtitan trains all weights")
    if intent.precision in ("fp16", "tf32"):
        missing.append(f"{intent.precision} products: torchtitan has bfloat16 and float32")
    if intent.autocast and intent.zero_stage == 0:
        missing.append("autocast on one device: torchtitan's mixed precision belongs to FSDP")
    if intent.task != "causal-lm":
        missing.append(f"the task {intent.task}: torchtitan trains causal language models")
    return Export(
        tool="torchtitan", files={"torchtitan.toml": _toml(values)}, missing=missing, values=values, keys=KEYS,
        flags=["--job.config_file", "torchtitan.toml"], source="torchtitan torchtitan/config/job_config.py",
    )  # fmt: skip


def _toml(values: dict[str, Any]) -> str:
    """Tables of strings, numbers and booleans as TOML."""
    import json

    lines = []
    for table, entries in values.items():
        lines.append(f"[{table}]")
        lines += [f"{key} = {json.dumps(value)}" for key, value in entries.items()]
        lines.append("")
    return "\n".join(lines)

"""A configuration file for `accelerate launch --config_file`."""

from __future__ import annotations

from typing import Any

from thrifty.planner.export.intent import Export, Intent

KEYS: dict[str, Any] = {
    "compute_environment": ["LOCAL_MACHINE"],
    "distributed_type": ["NO", "MULTI_GPU", "FSDP", "DEEPSPEED"],
    "mixed_precision": ["no", "fp16", "bf16", "fp8"],
    "num_machines": int, "num_processes": int, "machine_rank": int, "main_training_function": str, "use_cpu": bool,
    "deepspeed_config": {
        "zero_stage": int, "gradient_accumulation_steps": int, "gradient_clipping": float,
        "offload_optimizer_device": str,
        "offload_param_device": str, "zero3_init_flag": bool,
    },
    "fsdp_config": {
        "fsdp_version": int, "fsdp_auto_wrap_policy": str, "fsdp_reshard_after_forward": bool,
        "fsdp_state_dict_type": str,
        "fsdp_cpu_ram_efficient_loading": bool, "fsdp_activation_checkpointing": bool,
    },
    "dynamo_config": {"dynamo_backend": str},
}  # fmt: skip


def export(intent: Intent) -> Export:
    """Processes, precision and sharding; the rest belongs to the training script."""
    import yaml

    kind = "NO" if intent.devices == 1 else {0: "MULTI_GPU", 3: "FSDP"}.get(intent.zero_stage, "DEEPSPEED")
    values: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": kind,
        "mixed_precision": intent.precision if intent.autocast else "no",
        "num_machines": 1,
        "num_processes": intent.devices,
        "machine_rank": 0,
        "main_training_function": "main",
        "use_cpu": False,
    }
    if kind == "DEEPSPEED":
        values["deepspeed_config"] = {
            "zero_stage": intent.zero_stage,
            "gradient_accumulation_steps": intent.accumulation,
            "gradient_clipping": intent.max_grad_norm,
            "offload_optimizer_device": "none",
            "offload_param_device": "none",
            "zero3_init_flag": False,
        }
    if kind == "FSDP":
        values["fsdp_config"] = {
            "fsdp_version": 2,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_reshard_after_forward": True,
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",
            "fsdp_cpu_ram_efficient_loading": True,
            "fsdp_activation_checkpointing": intent.checkpointing,
        }
    if intent.compiled:
        values["dynamo_config"] = {"dynamo_backend": "INDUCTOR"}
    missing = [
        *intent.missing,
        *intent.unexpressed(),
        f"micro-batch {intent.micro_batch}: the script's DataLoader",
        f"{intent.optimizer_words}, learning rate {intent.learning_rate:g}: the script",
    ]
    if kind != "DEEPSPEED":
        missing.append(f"gradient clipping at {intent.max_grad_norm:g}: accelerator.clip_grad_norm_ in the script")
        missing.append(
            f"accumulation {intent.accumulation}: Accelerator(gradient_accumulation_steps={intent.accumulation})"
        )
    if intent.precision == "tf32":
        missing.append("TF32 products: the script")
    if intent.checkpoint_every > 1:
        missing.append(f"checkpointing of one block in {intent.checkpoint_every}: the script")
    missing.append(f"sequence length {intent.seq_len}: the script's data")
    if intent.checkpointing and kind != "FSDP":
        missing.append("gradient checkpointing: model.gradient_checkpointing_enable() in the script")
    if intent.adapter is not None:
        missing.append("the adapter: peft.get_peft_model in the script")
    if intent.dtype != "float32":
        missing.append(f"weights in {intent.dtype}: the script")
    return Export(
        tool="accelerate", files={"accelerate.yaml": yaml.safe_dump(values, sort_keys=False)},
        flags=["--config_file", "accelerate.yaml"], missing=missing, values=values, keys=KEYS,
        source="accelerate: Launching your scripts, and `accelerate config --help`",
    )  # fmt: skip

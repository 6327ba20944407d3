"""A LLaMA-Factory configuration, `llamafactory.yaml`."""

from __future__ import annotations

import json
from typing import Any

from thrifty.planner.export.deepspeed import integrated
from thrifty.planner.export.intent import Export, Intent

KEYS: dict[str, Any] = {
    "model_name_or_path": str, "stage": ["pt", "sft"], "do_train": bool, "finetuning_type": ["full", "lora"],
    "lora_rank": int, "lora_alpha": int, "lora_dropout": float, "lora_target": str, "use_dora": bool,
    "use_rslora": bool, "pissa_init": bool, "pissa_iter": int, "additional_target": str,
    "quantization_method": ["bnb"], "quantization_bit": [4, 8], "quantization_type": ["nf4", "fp4"],
    "double_quantization": bool, "cutoff_len": int, "packing": bool, "neat_packing": bool,
    "per_device_train_batch_size": int, "gradient_accumulation_steps": int, "learning_rate": float,
    "weight_decay": float, "adam_beta1": float, "adam_beta2": float, "adam_epsilon": float, "max_grad_norm": float,
    "optim": str, "bf16": bool, "fp16": bool, "tf32": bool, "pure_bf16": bool,
    "disable_gradient_checkpointing": bool, "flash_attn": ["auto", "sdpa", "fa2", "fa3", "disabled"],
    "torch_compile": bool, "deepspeed": str, "output_dir": str, "dataset": str, "template": str,
}  # fmt: skip
SOURCE = "LLaMA-Factory 0.9.5: llamafactory/hparams"


def export(intent: Intent) -> Export:
    """`llamafactory-cli train llamafactory.yaml`."""
    import yaml

    missing = [
        *intent.missing,
        *intent.unexpressed("quantization", "packing", "use_dora", "use_rslora", "init_lora_weights",
                            "modules_to_save"),
        "the data: fill in `dataset` and `template`",
    ]  # fmt: skip
    lora = intent.adapter is not None and intent.adapter.kind == "LORA"
    # pure_bf16 also keeps adapters in 16 bits, which peft does not.
    pure = intent.dtype == "bfloat16" and not lora and intent.zero_stage < 3
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
        "bf16": intent.precision == "bf16" and not pure,
        "fp16": intent.precision == "fp16",
        "disable_gradient_checkpointing": not intent.checkpointing,
        "flash_attn": "fa2" if intent.packing else "sdpa",
        "dataset": "your_dataset",
        "template": "default",
        "output_dir": "out",
    }
    if pure:
        values["pure_bf16"] = True
    elif intent.dtype != "float32" and not lora:
        missing.append(f"weights in {intent.dtype}: LLaMA-Factory keeps trained weights in float32 here")
    if lora and intent.dtype == "float32" and intent.precision in ("bf16", "fp16"):
        missing.append(f"frozen weights in float32: LLaMA-Factory loads them in {intent.precision}")
    if intent.precision == "tf32":
        values["tf32"] = True
    if intent.compiled:
        values["torch_compile"] = True
    if intent.packing:
        values |= {"packing": True, "neat_packing": True}
    if intent.optim is not None:
        values["optim"] = intent.optim
    else:
        missing.append(intent.optimizer_words)
    if lora:
        values |= _adapter(intent)
    elif intent.adapter is not None:
        missing.append(f"the adapter {intent.adapter.kind}")
    if intent.checkpoint_every > 1:
        missing.append(f"checkpointing of one block in {intent.checkpoint_every}: LLaMA-Factory checkpoints all")
    files, flags = {}, ["train", "llamafactory.yaml"]
    if intent.zero_stage:
        files["ds_config.json"] = json.dumps(integrated(intent), indent=2) + "\n"
        values["deepspeed"] = "ds_config.json"
        if intent.precision in ("bf16", "fp16"):
            missing.append("memory of DeepSpeed's own mixed precision: 16-bit weights with float32 masters")
    if intent.task != "causal-lm":
        missing.append(f"the task {intent.task}: LLaMA-Factory trains causal language models")
    files = {"llamafactory.yaml": yaml.safe_dump(values, sort_keys=False), **files}
    return Export(
        tool="llamafactory", files=files, flags=flags, missing=missing, values=values, keys=KEYS, source=SOURCE,
    )  # fmt: skip


def _adapter(intent: Intent) -> dict[str, Any]:
    adapter = intent.adapter
    assert adapter is not None
    values: dict[str, Any] = {
        "finetuning_type": "lora", "lora_rank": adapter.rank, "lora_alpha": int(adapter.alpha or 0),
        "lora_dropout": adapter.dropout, "lora_target": "all" if adapter.all_linear else ",".join(adapter.targets),
    }  # fmt: skip
    extras = adapter.extras
    values |= {key: extras[key] for key in ("use_dora", "use_rslora") if key in extras}
    if "modules_to_save" in extras:
        values["additional_target"] = ",".join(extras["modules_to_save"])
    start = str(extras.get("init_lora_weights", ""))
    if start.startswith("pissa"):
        values |= {"pissa_init": True, "pissa_iter": int(start.rpartition("_")[2]) if "niter" in start else -1}
    if intent.quantization:
        values |= {
            "quantization_method": "bnb", "quantization_bit": 4, "quantization_type": intent.quantization,
            "double_quantization": intent.double_quantization,
        }  # fmt: skip
    return values

"""An Axolotl configuration, `axolotl.yaml`."""

from __future__ import annotations

import json
from typing import Any

from thrifty.planner.export.deepspeed import integrated
from thrifty.planner.export.intent import Export, Intent

KEYS: dict[str, Any] = {
    "base_model": str, "sequence_len": int, "micro_batch_size": int, "gradient_accumulation_steps": int,
    "bf16": bool, "fp16": bool, "tf32": bool, "bfloat16": bool, "float16": bool, "gradient_checkpointing": bool,
    "optimizer": str, "learning_rate": float, "weight_decay": float, "adam_beta1": float, "adam_beta2": float,
    "adam_epsilon": float, "max_grad_norm": float, "adapter": ["lora", "qlora"], "load_in_4bit": bool,
    "bnb_config_kwargs": {"bnb_4bit_quant_type": ["nf4"], "bnb_4bit_use_double_quant": bool},
    "lora_r": int, "lora_alpha": int, "lora_dropout": float, "lora_target_linear": bool, "lora_target_modules": list,
    "lora_modules_to_save": list, "peft_use_dora": bool, "peft_use_rslora": bool,
    "peft_init_lora_weights": (bool, str), "torch_compile": bool,
    "attn_implementation": ["sdpa", "flash_attention_2"], "sample_packing": bool, "pad_to_sequence_len": bool,
    "deepspeed": str, "fsdp_version": int,
    "fsdp_config": {
        "reshard_after_forward": bool, "auto_wrap_policy": ["TRANSFORMER_BASED_WRAP"],
        "state_dict_type": ["FULL_STATE_DICT", "SHARDED_STATE_DICT"],
    },
    "datasets": list, "output_dir": str, "num_epochs": float,
}  # fmt: skip
SOURCE = "Axolotl 0.19.0: axolotl/utils/schemas, documented as Config Reference"
_EXTRAS = {
    "use_dora": "peft_use_dora", "use_rslora": "peft_use_rslora", "init_lora_weights": "peft_init_lora_weights",
    "modules_to_save": "lora_modules_to_save",
}  # fmt: skip


def export(intent: Intent) -> Export:
    """`axolotl train axolotl.yaml`."""
    import yaml

    missing = [
        *intent.missing,
        *intent.unexpressed("quantization", "packing", *_EXTRAS),
        "the data: fill in `datasets`, whose one entry only holds the place",
    ]
    lora = intent.adapter is not None and intent.adapter.kind == "LORA"
    # With bf16 Axolotl runs autocast over 16-bit weights; bfloat16 alone is without autocast.
    pure = intent.dtype != "float32" and not lora
    values: dict[str, Any] = {
        "base_model": intent.model,
        "sequence_len": intent.seq_len,
        "micro_batch_size": intent.micro_batch,
        "gradient_accumulation_steps": intent.accumulation,
        "bf16": intent.precision == "bf16" and not pure,
        "fp16": intent.precision == "fp16" and not pure,
        "tf32": intent.precision == "tf32",
        "gradient_checkpointing": intent.checkpointing,
        "learning_rate": intent.learning_rate,
        "weight_decay": intent.weight_decay,
        "adam_beta1": intent.betas[0],
        "adam_beta2": intent.betas[1],
        "adam_epsilon": intent.epsilon,
        "max_grad_norm": intent.max_grad_norm,
        "torch_compile": intent.compiled,
        "attn_implementation": "flash_attention_2" if intent.packing else "sdpa",
        "datasets": [{"path": "your/dataset", "type": "completion"}],
        "output_dir": "out",
    }
    if pure:
        values[intent.dtype] = True
    if intent.autocast:
        missing.append(f"float32 weights under {intent.precision} autocast: Axolotl loads the weights in 16 bits")
    if intent.packing:
        values |= {"sample_packing": True, "pad_to_sequence_len": True}
    if intent.optim is not None:
        values["optimizer"] = intent.optim
    else:
        missing.append(intent.optimizer_words)
    if lora:
        values |= _adapter(intent)
    elif intent.adapter is not None:
        missing.append(f"the adapter {intent.adapter.kind}")
    if intent.checkpoint_every > 1:
        missing.append(f"checkpointing of one block in {intent.checkpoint_every}: Axolotl checkpoints all")
    files = {}
    if intent.zero_stage in (1, 2):
        files["ds_config.json"] = json.dumps(integrated(intent), indent=2) + "\n"
        values["deepspeed"] = "ds_config.json"
        if intent.precision in ("bf16", "fp16"):
            missing.append("memory of DeepSpeed's own mixed precision: 16-bit weights with float32 masters")
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
        source=SOURCE,
    )  # fmt: skip


def _adapter(intent: Intent) -> dict[str, Any]:
    adapter = intent.adapter
    assert adapter is not None
    values: dict[str, Any] = {
        "adapter": "qlora" if intent.quantization else "lora", "lora_r": adapter.rank,
        "lora_alpha": int(adapter.alpha or 0), "lora_dropout": adapter.dropout,
    }  # fmt: skip
    values |= {"lora_target_linear": True} if adapter.all_linear else {"lora_target_modules": adapter.targets}
    if intent.quantization:
        values["load_in_4bit"] = True
        values["bnb_config_kwargs"] = {
            "bnb_4bit_quant_type": intent.quantization, "bnb_4bit_use_double_quant": intent.double_quantization,
        }  # fmt: skip
    return values | {_EXTRAS[key]: value for key, value in adapter.extras.items() if key in _EXTRAS}

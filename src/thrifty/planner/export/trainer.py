"""Keyword arguments of `transformers.TrainingArguments`, as JSON."""

from __future__ import annotations

import json
from typing import Any

from thrifty.planner.export.intent import Export, Intent


def export(intent: Intent) -> Export:
    """`TrainingArguments(**json.load(open("training_arguments.json")))`."""
    import dataclasses

    from transformers import TrainingArguments

    values: dict[str, Any] = {
        **intent.fields,
        "per_device_train_batch_size": intent.micro_batch,
        "gradient_accumulation_steps": intent.accumulation,
        "learning_rate": intent.learning_rate,
        "weight_decay": intent.weight_decay,
        "adam_beta1": intent.betas[0],
        "adam_beta2": intent.betas[1],
        "adam_epsilon": intent.epsilon,
        "max_grad_norm": intent.max_grad_norm,
    }
    missing = [*intent.missing, *intent.unexpressed()]
    if intent.adapter is not None:
        missing.append("the adapter: wrap the model with peft.get_peft_model before giving it to the Trainer")
    if intent.checkpoint_every > 1:
        missing.append(f"checkpointing of one block in {intent.checkpoint_every}: the Trainer checkpoints all")
    if intent.dtype != "float32":
        missing.append(f"weights in {intent.dtype}: from_pretrained(..., dtype='{intent.dtype}')")
    if intent.zero_stage == 3:
        values["fsdp"] = "full_shard auto_wrap"
    elif intent.zero_stage:
        missing.append(f"ZeRO stage {intent.zero_stage}: export deepspeed too and pass its file as `deepspeed`")
    if intent.optim is not None:
        values["optim"] = intent.optim
    else:
        missing.append(f"{intent.optimizer_words}: pass it as `optimizers` or `optimizer_cls_and_kwargs`")
    missing.append(f"sequence length {intent.seq_len}: where the data are tokenized")
    known = {f.name for f in dataclasses.fields(TrainingArguments) if f.init}
    values = {k: v for k, v in values.items() if v is not None}
    return Export(
        tool="trainer", files={"training_arguments.json": json.dumps(values, indent=2, default=str) + "\n"},
        missing=missing, values=values, keys=dict.fromkeys(known, object), source="transformers.TrainingArguments",
    )  # fmt: skip

"""A GPT-NeoX configuration, `neox.yml`."""

from __future__ import annotations

from typing import Any

from thrifty.planner.export.deepspeed import KEYS as DEEPSPEED_KEYS
from thrifty.planner.export.intent import Export, Intent

KEYS: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": int, "gradient_accumulation_steps": int, "gradient_clipping": float,
    "num_layers": int, "hidden_size": int, "num_attention_heads": int, "num_kv_heads": int, "intermediate_size": int,
    "seq_length": int, "max_position_embeddings": int, "pos_emb": ["learned", "rotary"], "norm": ["layernorm",
    "rmsnorm"],
    "no_weight_tying": bool, "activation": ["gelu", "swiglu"], "pipe_parallel_size": int, "model_parallel_size": int,
    "checkpoint_activations": bool, "checkpoint_num_layers": int,
    "zero_optimization": DEEPSPEED_KEYS["zero_optimization"],
    "optimizer": DEEPSPEED_KEYS["optimizer"], "weight_decay": float, "precision": ["fp32", "fp16", "bfloat16"],
    "fp16": {"enabled": bool, "loss_scale": (int, float)}, "bf16": {"enabled": bool},
}  # fmt: skip


def export(intent: Intent) -> Export:
    """For `deepy.py train.py neox.yml`."""
    import yaml

    config, missing = intent.config, list(intent.missing)
    get = lambda *names: next((v for n in names if (v := getattr(config, n, None)) is not None), None)  # noqa: E731
    gated = get("hidden_act") == "silu"
    values: dict[str, Any] = {
        "pipe_parallel_size": 1,
        "model_parallel_size": 1,
        "train_micro_batch_size_per_gpu": intent.micro_batch,
        "gradient_accumulation_steps": intent.accumulation,
        "gradient_clipping": intent.max_grad_norm,
        "num_layers": get("num_hidden_layers"),
        "hidden_size": get("hidden_size"),
        "num_attention_heads": get("num_attention_heads"),
        "num_kv_heads": get("num_key_value_heads"),
        "intermediate_size": get("intermediate_size"),
        "seq_length": intent.seq_len,
        "max_position_embeddings": get("max_position_embeddings"),
        "pos_emb": "rotary" if get("rope_parameters") or gated else "learned",
        "norm": "rmsnorm" if get("rms_norm_eps") else "layernorm",
        "activation": "swiglu" if gated else "gelu",
        "no_weight_tying": get("tie_word_embeddings") is False,
        "checkpoint_activations": intent.checkpointing,
        "zero_optimization": {"stage": intent.zero_stage, "overlap_comm": True, "contiguous_gradients": True},
        "weight_decay": intent.weight_decay,
        "precision": {"bf16": "bfloat16", "fp16": "fp16"}.get(intent.precision, "fp32"),
    }
    if intent.checkpointing:
        values["checkpoint_num_layers"] = 1
        if intent.checkpoint_every > 1:
            missing.append(f"checkpointing of one block in {intent.checkpoint_every}: GPT-NeoX checkpoints all")
    if intent.precision in ("bf16", "fp16"):
        missing.append("memory of GPT-NeoX's own mixed precision: 16-bit weights with float32 masters")
    if intent.optimizer in ("AdamW", "Lion"):
        params = {"lr": intent.learning_rate, "betas": list(intent.betas), "eps": intent.epsilon}
        # GPT-NeoX calls decoupled Adam "Adam".
        values["optimizer"] = {"type": "Adam" if intent.optimizer == "AdamW" else "Lion", "params": params}
    else:
        missing.append(f"the optimizer {intent.optimizer}")
    if intent.adapter is not None:
        missing.append("the adapter: GPT-NeoX trains all weights")
    if intent.precision == "tf32":
        missing.append("TF32 products")
    if intent.compiled:
        missing.append("torch.compile")
    if intent.task != "causal-lm":
        missing.append(f"the task {intent.task}: GPT-NeoX trains causal language models")
    values = {k: v for k, v in values.items() if v is not None}
    return Export(
        tool="neox", files={"neox.yml": yaml.safe_dump(values, sort_keys=False)}, flags=["train.py", "neox.yml"],
        missing=missing, values=values, keys=KEYS, source="GPT-NeoX configs/neox_arguments.md",
    )  # fmt: skip

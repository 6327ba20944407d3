"""A GPT-NeoX configuration, `neox.yml`."""

from __future__ import annotations

from typing import Any

from thrifty.planner.export.intent import Export, Intent

# NeoXArgs* of neox_args.py and deepspeed_args.py, each entry with its annotation.
KEYS: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": int, "gradient_accumulation_steps": int, "gradient_clipping": float,
    "num_layers": int, "hidden_size": int, "num_attention_heads": int, "num_kv_heads": int, "intermediate_size": int,
    "seq_length": int, "max_position_embeddings": int, "pos_emb": ["learned", "rotary"], "rotary_emb_base": int,
    "norm": ["layernorm", "rmsnorm"], "layernorm_epsilon": float, "rms_norm_epsilon": float,
    "no_weight_tying": bool, "activation": ["gelu", "swiglu"], "use_bias_in_norms": bool,
    "use_bias_in_attn_linear": bool, "use_bias_in_mlp": bool, "pipe_parallel_size": int, "model_parallel_size": int,
    "attention_dropout": float, "hidden_dropout": float, "checkpoint_activations": bool, "checkpoint_num_layers": int,
    "zero_optimization": {"stage": [0, 1, 2, 3], "overlap_comm": bool, "contiguous_gradients": bool},
    "optimizer": {
        "type": ["Adam", "Lion"], "params": {"lr": float, "betas": list, "eps": float, "weight_decay": float},
    },
    "weight_decay": float, "precision": ["fp32", "fp16", "bfloat16"],
    "fp16": {"enabled": bool, "loss_scale": int}, "bf16": {"enabled": bool},
    "pack_impl": ["packed", "pack_until_overflow", "unpacked"],
}  # fmt: skip
SOURCE = "GPT-NeoX, main of late 2024: megatron/neox_arguments/neox_args.py and deepspeed_args.py"


def export(intent: Intent) -> Export:
    """For `deepy.py train.py neox.yml`."""
    import yaml

    config = intent.config
    missing = [*intent.missing, *intent.unexpressed("packing"),
               "data, tokenizer, number of steps: data_path, tokenizer_type, train_iters"]  # fmt: skip
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
        # GPT-NeoX takes two thirds of it for gate and value together, half of them each.
        "intermediate_size": (get("intermediate_size", "n_inner") or 0) * (3 if gated else 1) or None,
        "seq_length": intent.seq_len,
        "max_position_embeddings": get("max_position_embeddings"),
        "pos_emb": "rotary" if get("rope_parameters") or gated else "learned",
        "norm": "rmsnorm" if get("rms_norm_eps") else "layernorm",
        "rms_norm_epsilon": get("rms_norm_eps"),
        "layernorm_epsilon": get("layer_norm_epsilon", "layer_norm_eps"),
        "attention_dropout": float(get("attention_dropout", "attn_pdrop") or 0.0),
        "hidden_dropout": float(get("resid_pdrop", "hidden_dropout") or 0.0),
        "activation": "swiglu" if gated else "gelu",
        "no_weight_tying": get("tie_word_embeddings") is False,
        "checkpoint_activations": intent.checkpointing,
        "zero_optimization": {"stage": intent.zero_stage, "overlap_comm": True, "contiguous_gradients": True},
        "weight_decay": intent.weight_decay,
        "precision": {"bf16": "bfloat16", "fp16": "fp16"}.get(intent.precision, "fp32"),
    }
    rope = get("rope_parameters") or {}
    if values["pos_emb"] == "rotary" and rope.get("rope_theta"):
        values["rotary_emb_base"] = int(rope["rope_theta"])
    if rope.get("rope_type", "default") != "default":
        missing.append(f"rotary embeddings of type {rope['rope_type']}")
    if gated:
        bias = bool(get("attention_bias"))
        values |= {"use_bias_in_norms": False, "use_bias_in_attn_linear": bias, "use_bias_in_mlp": False}
    if config.model_type == "qwen3":
        missing.append("normed queries and keys: GPT-NeoX's use_qk_layernorm norms them with its own layer norm")
    if intent.packing:
        values["pack_impl"] = "packed"
    if intent.checkpointing:
        values["checkpoint_num_layers"] = 1
        if intent.checkpoint_every > 1:
            missing.append(f"checkpointing of one block in {intent.checkpoint_every}: GPT-NeoX checkpoints all")
    if intent.dtype != "float32":
        missing.append(f"pure {intent.dtype}: GPT-NeoX keeps float32 masters beside it")
    if intent.precision == "bf16":
        values["bf16"] = {"enabled": True}
    if intent.precision == "fp16":
        values["fp16"] = {"enabled": True, "loss_scale": 0}
    if intent.precision in ("bf16", "fp16"):
        missing.append("memory of GPT-NeoX's own mixed precision: 16-bit weights with float32 masters")
    if intent.optimizer in ("AdamW", "Lion"):
        params: dict[str, Any] = {"lr": intent.learning_rate, "betas": list(intent.betas)}
        if intent.optimizer == "AdamW":
            params["eps"] = intent.epsilon
        if intent.optimizer_settings:
            missing.append(f"settings of {intent.optimizer_words}")
        # GPT-NeoX calls decoupled Adam "Adam".
        values["optimizer"] = {"type": "Adam" if intent.optimizer == "AdamW" else "Lion", "params": params}
    else:
        missing.append(intent.optimizer_words)
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
        missing=missing, values=values, keys=KEYS, source=SOURCE,
    )  # fmt: skip

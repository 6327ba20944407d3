"""Launch flags of Megatron-LM's `pretrain_gpt.py`."""

from __future__ import annotations

from typing import Any

from thrifty.planner.export.intent import Export, Intent

KEYS: dict[str, Any] = {
    "micro-batch-size": int, "global-batch-size": int, "seq-length": int, "num-layers": int, "hidden-size": int,
    "ffn-hidden-size": int, "num-attention-heads": int, "group-query-attention": bool, "num-query-groups": int,
    "kv-channels": int, "max-position-embeddings": int, "position-embedding-type": ["learned_absolute", "rope"],
    "normalization": ["LayerNorm", "RMSNorm"], "norm-epsilon": float, "swiglu": bool, "disable-bias-linear": bool,
    "untie-embeddings-and-output-weights": bool, "bf16": bool, "fp16": bool, "lr": float, "weight-decay": float,
    "clip-grad": float, "adam-beta1": float, "adam-beta2": float, "adam-eps": float, "optimizer": ["adam", "sgd"],
    "recompute-granularity": ["full", "selective"], "recompute-method": ["uniform", "block"],
    "recompute-num-layers": int,
    "attention-dropout": float, "hidden-dropout": float, "sgd-momentum": float, "add-qkv-bias": bool,
    "qk-layernorm": bool, "use-rope-scaling": bool, "rope-scaling-factor": float, "vocab-size": int,
    "ckpt-format": ["torch_dist", "fsdp_dtensor"],
    "use-distributed-optimizer": bool, "use-megatron-fsdp": bool,
    "data-parallel-sharding-strategy": ["no_shard", "optim", "optim_grads", "optim_grads_params"],
    "tensor-model-parallel-size": int, "pipeline-model-parallel-size": int, "rotary-base": int,
}  # fmt: skip
SOURCE = "Megatron-LM core 0.16: megatron/training/arguments.py and the dataclasses of megatron.core"


def export(intent: Intent) -> Export:
    """Flags for one node of data-parallel training."""
    config = intent.config
    missing = [*intent.missing, *intent.unexpressed(),
               "data, tokenizer, number of steps: --data-path, --tokenizer-type, --train-iters"]  # fmt: skip
    get = lambda *names: next((v for n in names if (v := getattr(config, n, None)) is not None), None)  # noqa: E731
    heads, groups = get("num_attention_heads"), get("num_key_value_heads")
    gated = get("hidden_act") == "silu"
    values: dict[str, Any] = {
        "tensor-model-parallel-size": 1,
        "pipeline-model-parallel-size": 1,
        "micro-batch-size": intent.micro_batch,
        "global-batch-size": intent.global_batch,
        "seq-length": intent.seq_len,
        "num-layers": get("num_hidden_layers"),
        "hidden-size": get("hidden_size"),
        "ffn-hidden-size": get("intermediate_size", "n_inner") or 4 * (get("hidden_size") or 0),
        "num-attention-heads": heads,
        "max-position-embeddings": get("max_position_embeddings"),
        "position-embedding-type": "rope" if get("rope_parameters") or gated else "learned_absolute",
        "normalization": "RMSNorm" if get("rms_norm_eps") else "LayerNorm",
        "norm-epsilon": get("rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps") or 1e-5,
        "optimizer": "adam",
        "lr": intent.learning_rate,
        "weight-decay": intent.weight_decay,
        "adam-beta1": intent.betas[0],
        "adam-beta2": intent.betas[1],
        "adam-eps": intent.epsilon,
        "clip-grad": intent.max_grad_norm,
        # Megatron drops a tenth by default.
        "attention-dropout": float(get("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob") or 0.0),
        "hidden-dropout": float(get("resid_pdrop", "hidden_dropout", "hidden_dropout_prob") or 0.0),
        "vocab-size": get("vocab_size"),
    }
    _positions(intent, values, missing)
    if groups and groups != heads:
        values |= {"group-query-attention": True, "num-query-groups": groups}
    if get("head_dim"):
        values["kv-channels"] = get("head_dim")
    if gated:
        values |= {"swiglu": True, "disable-bias-linear": True}
        if get("attention_bias") or config.model_type == "qwen2":
            values["add-qkv-bias"] = True
    if config.model_type == "qwen3":
        values["qk-layernorm"] = True
    if get("num_local_experts", "num_experts"):
        missing.append("experts: Megatron's --num-experts and its kin")
    if get("tie_word_embeddings") is False:
        values["untie-embeddings-and-output-weights"] = True
    if intent.precision in ("bf16", "fp16"):
        values[intent.precision] = True
        missing.append(
            "memory of Megatron's own mixed precision: 16-bit weights with float32 masters and main gradients"
        )
    if intent.dtype != "float32":
        missing.append(f"pure {intent.dtype}: Megatron keeps float32 masters beside it")
    if intent.precision == "tf32":
        missing.append("TF32 products: set them in the environment of the script")
    if intent.checkpointing:
        values |= {"recompute-granularity": "full", "recompute-method": "uniform", "recompute-num-layers": 1}
        if intent.checkpoint_every > 1:
            share = -(-(get("num_hidden_layers") or 1) // intent.checkpoint_every)
            values |= {"recompute-method": "block", "recompute-num-layers": share}
            missing.append(f"every block in {intent.checkpoint_every}: Megatron recomputes the first {share} instead")
    if intent.zero_stage == 1:
        values["use-distributed-optimizer"] = True
    if intent.zero_stage >= 2:
        strategy = "optim_grads" if intent.zero_stage == 2 else "optim_grads_params"
        values |= {
            "use-distributed-optimizer": True,
            "use-megatron-fsdp": True,
            "data-parallel-sharding-strategy": strategy,
            "ckpt-format": "fsdp_dtensor",  # Megatron FSDP knows no other
        }
    if intent.optimizer == "SGD":
        values |= {"optimizer": "sgd", "sgd-momentum": 0.0}
    elif intent.optimizer != "AdamW" or intent.optimizer_settings:
        missing.append(f"{intent.optimizer_words}: Megatron has adam and sgd")
    if intent.adapter is not None:
        missing.append("the adapter: Megatron-LM trains all weights")
    if intent.compiled:
        missing.append("torch.compile of the whole model")
    if intent.task != "causal-lm":
        missing.append(f"the task {intent.task}: pretrain_gpt.py trains causal language models")
    values = {k: v for k, v in values.items() if v is not None}
    flags: list[str] = []
    for key, value in values.items():
        flags += [f"--{key}"] if value is True else [f"--{key}", str(value)]
    # Megatron FSDP refuses to run with one connection, which scripts for tensor parallelism set.
    start = ["unset CUDA_DEVICE_MAX_CONNECTIONS"] if values.get("use-megatron-fsdp") else []
    command = " \\\n  ".join([f"torchrun --nproc-per-node {intent.devices} pretrain_gpt.py", *_pairs(flags)])
    text = "\n".join([*start, command, ""])
    return Export(
        tool="megatron", files={"megatron.sh": text}, flags=flags, missing=missing, values=values, keys=KEYS,
        source=SOURCE,
    )  # fmt: skip


def _positions(intent: Intent, values: dict[str, Any], missing: list[str]) -> None:
    """Base and scaling of rotary embeddings."""
    rope = getattr(intent.config, "rope_parameters", None) or {}
    base = rope.get("rope_theta") or getattr(intent.config, "rope_theta", None)
    if values["position-embedding-type"] == "rope" and base:
        values["rotary-base"] = int(base)
    kind = rope.get("rope_type", "default")
    if kind == "llama3":
        values |= {"use-rope-scaling": True, "rope-scaling-factor": float(rope["factor"])}
    elif kind != "default":
        missing.append(f"rotary embeddings of type {kind}")


def _pairs(flags: list[str]) -> list[str]:
    lines: list[str] = []
    for flag in flags:
        if flag.startswith("--"):
            lines.append(flag)
        else:
            lines[-1] += f" {flag}"
    return lines

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
    "use-distributed-optimizer": bool, "use-megatron-fsdp": bool,
    "data-parallel-sharding-strategy": ["no_shard", "optim", "optim_grads", "optim_grads_params"],
    "tensor-model-parallel-size": int, "pipeline-model-parallel-size": int, "rotary-base": int,
}  # fmt: skip


def export(intent: Intent) -> Export:
    """Flags for one node of data-parallel training."""
    config, missing = intent.config, list(intent.missing)
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
    }
    if groups and groups != heads:
        values |= {"group-query-attention": True, "num-query-groups": groups}
    if get("head_dim"):
        values["kv-channels"] = get("head_dim")
    if gated:
        values |= {"swiglu": True, "disable-bias-linear": True}
    if get("tie_word_embeddings") is False:
        values["untie-embeddings-and-output-weights"] = True
    if intent.precision in ("bf16", "fp16"):
        values[intent.precision] = True
        missing.append(
            "memory of Megatron's own mixed precision: 16-bit weights with float32 masters and main gradients"
        )
    if intent.precision == "tf32":
        missing.append("TF32 products: set them in the environment of the script")
    if intent.checkpointing:
        values |= {"recompute-granularity": "full", "recompute-method": "uniform", "recompute-num-layers": 1}
        if intent.checkpoint_every > 1:
            share = -(-(get("num_hidden_layers") or 1) // intent.checkpoint_every)
            values |= {"recompute-method": "block", "recompute-num-layers": share}
    if intent.zero_stage == 1:
        values["use-distributed-optimizer"] = True
    if intent.zero_stage >= 2:
        strategy = "optim_grads" if intent.zero_stage == 2 else "optim_grads_params"
        values |= {
            "use-distributed-optimizer": True,
            "use-megatron-fsdp": True,
            "data-parallel-sharding-strategy": strategy,
        }
    if intent.optimizer != "AdamW":
        missing.append(f"the optimizer {intent.optimizer}: Megatron has adam and sgd")
    if intent.adapter is not None:
        missing.append("the adapter: Megatron-LM trains all weights")
    if intent.compiled:
        missing.append("torch.compile of the whole model")
    if intent.task != "causal-lm":
        missing.append(f"the task {intent.task}: pretrain_gpt.py trains causal language models")
    values = {k: v for k, v in values.items() if v is not None}
    flags: list[str] = []
    for key, value in values.items():
        flags += (
            [f"--{key}"] if value is True else [f"--{key}", f"{value:g}" if isinstance(value, float) else str(value)]
        )
    text = " \\\n  ".join([f"torchrun --nproc-per-node {intent.devices} pretrain_gpt.py", *_pairs(flags)]) + "\n"
    return Export(
        tool="megatron", files={"megatron.sh": text}, flags=flags, missing=missing, values=values, keys=KEYS,
        source="Megatron-LM megatron/training/arguments.py",
    )  # fmt: skip


def _pairs(flags: list[str]) -> list[str]:
    lines: list[str] = []
    for flag in flags:
        if flag.startswith("--"):
            lines.append(flag)
        else:
            lines[-1] += f" {flag}"
    return lines

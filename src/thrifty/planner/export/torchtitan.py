"""A torchtitan configuration: a Python module with one function, as torchtitan's own registries are."""

from __future__ import annotations

from typing import Any

from thrifty.planner.export.intent import Export, Intent

KEYS: dict[str, Any] = {
    "model": {"module": ["llama3", "qwen3"], "flavor": str},
    "training": {
        "local_batch_size": int, "global_batch_size": int, "seq_len": int, "max_norm": float,
        "dtype": ["float32", "bfloat16"], "mixed_precision_param": ["bfloat16", "float32"],
        "mixed_precision_reduce": ["float32"], "disable_cuda_graphs": bool,
    },
    "parallelism": {
        "data_parallel_replicate_degree": int, "data_parallel_shard_degree": int,
        "fsdp_reshard_after_forward": ["default", "always", "never"],
        "tensor_parallel_degree": int, "pipeline_parallel_degree": int, "context_parallel_degree": int,
    },
    "optimizer": {"lr": float, "betas": tuple, "eps": float, "weight_decay": float,
                  "implementation": ["for-loop", "foreach", "fused"]},
    "activation_checkpoint": ["none", "full"],
    "compile": {"enable": bool},
}  # fmt: skip
SOURCE = "torchtitan 0.3.0: torchtitan/config/configs.py and torchtitan/models"
_FLAVORS = {
    ("llama", 2048, 16): ("llama3", "1B"), ("llama", 3072, 28): ("llama3", "3B"),
    ("llama", 4096, 32): ("llama3", "8B"), ("llama", 8192, 80): ("llama3", "70B"),
    ("llama", 16384, 126): ("llama3", "405B"), ("qwen3", 1024, 28): ("qwen3", "0.6B"),
    ("qwen3", 2048, 28): ("qwen3", "1.7B"), ("qwen3", 2560, 36): ("qwen3", "4B"), ("qwen3", 4096, 36): ("qwen3", "8B"),
    ("qwen3", 5120, 40): ("qwen3", "14B"), ("qwen3", 5120, 64): ("qwen3", "32B"),
}  # fmt: skip
"""Family, hidden size and layers of the sizes that torchtitan has."""


def export(intent: Intent) -> Export:
    """For `torchrun -m torchtitan.train --module torchtitan_plan --config planned`."""
    missing = [*intent.missing, *intent.unexpressed()]
    config = intent.config
    size = (config.model_type, getattr(config, "hidden_size", 0), getattr(config, "num_hidden_layers", 0))
    module, flavor = _FLAVORS.get(size, ("qwen3" if config.model_type == "qwen3" else "llama3", "debugmodel"))
    if flavor == "debugmodel":
        missing.append(f"the model's dimensions: torchtitan has no {module} of this size; put one in `model_registry`")
    shards = intent.devices if intent.zero_stage else 1
    values: dict[str, Any] = {
        "model": {"module": module, "flavor": flavor},
        "training": {
            "local_batch_size": intent.micro_batch, "global_batch_size": intent.global_batch, "seq_len": intent.seq_len,
            "max_norm": intent.max_grad_norm, "dtype": "bfloat16" if intent.dtype == "bfloat16" else "float32",
            "mixed_precision_param": "bfloat16" if intent.precision == "bf16" else "float32",
            "mixed_precision_reduce": "float32", "disable_cuda_graphs": True,
        },
        "parallelism": {
            "data_parallel_replicate_degree": intent.devices // shards, "data_parallel_shard_degree": shards,
            "fsdp_reshard_after_forward": "always" if intent.zero_stage == 3 else "never",
            "tensor_parallel_degree": 1, "pipeline_parallel_degree": 1, "context_parallel_degree": 1,
        },
        "optimizer": {
            "lr": intent.learning_rate, "betas": intent.betas, "eps": intent.epsilon,
            "weight_decay": intent.weight_decay,
            "implementation": "foreach" if intent.optim == "adamw_torch" else "fused",
        },
        "activation_checkpoint": "full" if intent.checkpointing else "none",
        "compile": {"enable": intent.compiled},
    }  # fmt: skip
    if intent.checkpoint_every > 1:
        missing.append(f"checkpointing of one block in {intent.checkpoint_every}: torchtitan recomputes all, or by op")
    if intent.zero_stage == 1:
        missing.append("ZeRO stage 1: FSDP2 divides gradients and weights too")
    if intent.optimizer != "AdamW" or intent.optimizer_settings:
        missing.append(intent.optimizer_words)
    if intent.adapter is not None:
        missing.append("the adapter: torchtitan trains all weights")
    if intent.precision in ("fp16", "tf32"):
        missing.append(f"{intent.precision} products: torchtitan has bfloat16 and float32")
    if intent.dtype == "float16":
        missing.append("weights in float16: torchtitan has bfloat16 and float32")
    if intent.task != "causal-lm":
        missing.append(f"the task {intent.task}: torchtitan trains causal language models")
    missing.append("data, tokenizer, number of steps: the fields dataloader, hf_assets_path and training.steps")
    flags = ["--nproc-per-node", str(intent.devices), "-m", "torchtitan.train", "--module", "torchtitan_plan",
             "--config", "planned"]  # fmt: skip
    return Export(
        tool="torchtitan", files={"torchtitan_plan.py": _module(values)}, missing=missing, values=values, keys=KEYS,
        flags=flags, source=SOURCE,
    )  # fmt: skip


def _module(values: dict[str, Any]) -> str:
    """The module's text; fields that the plan does not set keep the values of torchtitan's smallest model."""
    module = values["model"]["module"]
    optimizer = dict(values["optimizer"])
    implementation = optimizer.pop("implementation")
    full = values["activation_checkpoint"] == "full"
    lines = [
        "from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss",
        "from torchtitan.components.optimizer import default_adamw",
        *(["from torchtitan.distributed.activation_checkpoint import FullAC"] if full else []),
        "from torchtitan.models.common.config_utils import decoder_vocab_size",
        f"from torchtitan.models.{module} import model_registry",
        f"from torchtitan.models.{module}.config_registry import {module}_debugmodel",
        "from torchtitan.trainer import Trainer", "", "",
        "def planned() -> Trainer.Config:",
        f"    config = {module}_debugmodel()",
        f"    config.model_spec = model_registry({values['model']['flavor']!r})",
        "    vocabulary = decoder_vocab_size(config.model_spec)",
        "    config.loss = ChunkedLossWrapper.Config(loss_fn=CrossEntropyLoss.Config(global_vocab_size=vocabulary))",
        "    config.validator.enable = False",
        f"    config.optimizer = default_adamw({', '.join(f'{k}={v!r}' for k, v in optimizer.items())})",
        f"    config.optimizer.implementation = {implementation!r}",
        f"    config.activation_checkpoint = {'FullAC.Config()' if full else 'None'}",
        *(f"    config.{table}.{key} = {value!r}" for table in ("training", "parallelism", "compile")
          for key, value in values[table].items()),
        "    return config", "",
    ]  # fmt: skip
    return "\n".join(lines)

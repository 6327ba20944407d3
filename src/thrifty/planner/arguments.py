"""The `TrainingArguments` that decide what a step costs."""

from __future__ import annotations

from typing import Any

GRAPH_ARGUMENTS = (
    "bf16", "fp16", "tf32", "optim", "optim_args", "optim_target_modules", "max_grad_norm", "torch_compile",
    "gradient_checkpointing", "activation_checkpointing", "learning_rate", "adam_beta1", "adam_beta2", "adam_epsilon",
    "weight_decay", "label_smoothing_factor",
)  # fmt: skip
# Of these, what a micro-batch sees; the others concern the update.
PASS_ARGUMENTS = (
    "bf16", "fp16", "gradient_checkpointing", "activation_checkpointing", "checkpointing", "label_smoothing_factor",
)  # fmt: skip
_PLAIN: dict[type, Any] = {}


def plain_arguments(cls: type) -> Any:
    """The defaults of a class of arguments, made once."""
    if cls not in _PLAIN:
        _PLAIN[cls] = cls(output_dir="unused", use_cpu=True, report_to=[])
    return _PLAIN[cls]

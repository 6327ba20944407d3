"""What to change when a single sample does not fit: the three cheapest changes that free enough.

Cheap means: first what does not change the result, then what slows least. The bytes are estimates from the model's own
shapes (activations of a decoder layer as in Korthikanti et al. 2022, eq. 1); `thrifty plan` gives measured ones.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

_UNITS = {
    "bytes": 1,
    "B": 1,
    "KiB": 1 << 10,
    "MiB": 1 << 20,
    "GiB": 1 << 30,
    "TiB": 1 << 40,
    "KB": 1 << 10,
    "MB": 1 << 20,
}
_UNITS |= {"GB": 1 << 30}


@dataclass(frozen=True)
class Change:
    """One change of configuration, what it frees (bytes) and what it costs."""

    text: str
    frees: int
    slowdown: float
    """Step time afterwards over step time now; below 1 it is faster."""
    same_result: bool
    """Whether training computes the same, but for rounding."""


def bytes_asked(message: str) -> int:
    """Returns how many bytes an out-of-memory message says were asked for, 0 where it does not say.

    >>> bytes_asked("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has ...")
    2684354560
    >>> bytes_asked("DefaultCPUAllocator: can't allocate memory: you tried to allocate 67108864 bytes. Error code 12")
    67108864
    """
    found = re.search(r"ried to allocate ([\d.]+) ?([KMGT]?i?B|bytes)", message)
    return int(float(found[1]) * _UNITS[found[2]]) if found else 0


def possible_changes(model: nn.Module, inputs: Mapping[str, Any], args: Any) -> list[Change]:
    """Returns every change that would free memory for one sample of `inputs`, cheapest first.

    Args:
        model: The model in training.
        inputs: A collated batch; the length is read from `input_ids` (rows, length) where there are any.
        args: `transformers.TrainingArguments`, or anything with some of its fields.
    """
    config = getattr(getattr(model, "config", None), "get_text_config", lambda: None)()
    ids = inputs.get("input_ids")
    length = int(ids.shape[1]) if ids is not None and len(ids.shape) > 1 else 1
    layers, width = getattr(config, "num_hidden_layers", 1), getattr(config, "hidden_size", 0)
    heads, vocabulary = getattr(config, "num_attention_heads", 1), getattr(config, "vocab_size", 0)
    trainable = [p for p in model.parameters() if p.requires_grad]
    weights = sum(p.numel() for p in trainable)
    reduced = any(getattr(args, name, False) for name in ("bf16", "fp16")) or all(
        p.element_size() == 2 for p in trainable
    )
    linear = (34 if reduced else 68) * length * width * layers
    eager = getattr(config, "_attn_implementation", None) == "eager"
    quadratic = (5 if reduced else 9) * heads * length**2 * layers if eager else 0
    logits = 12 * length * vocabulary
    checkpointed = any(getattr(module, "gradient_checkpointing", False) for module in model.modules())
    if checkpointed:
        linear, quadratic = linear // max(layers, 1), quadratic // max(layers, 1)
    partial = len(trainable) < len(list(model.parameters()))
    optimizer = str(getattr(args, "optim", "adamw_torch")).rsplit(".", 1)[-1].lower()
    changes: list[Change] = []

    def offer(text: str, frees: float, slowdown: float, same_result: bool = True) -> None:
        if frees > 0:
            changes.append(Change(text, int(frees), slowdown, same_result))

    if eager:
        offer('attn_implementation="sdpa"', quadratic, 0.9)
    if not checkpointed:
        offer("gradient_checkpointing=True", (linear + quadratic) * (layers - 1) / max(layers, 1), 1.3)
    if not reduced:
        offer("bf16=True, where the device has it", (linear + quadratic) / 2, 0.7, same_result=False)
    offer(f"max_length={max(length // 2, 1)}", (linear + logits) / 2 + quadratic * 3 / 4, 0.5, same_result=False)
    if "adamw" in optimizer and "bit" not in optimizer:
        offer('optim="adafactor"', 7.9 * weights, 1.1, same_result=False)
    if not partial:
        offer("LoRA instead of full fine-tuning", 12 * weights * 0.98, 0.8, same_result=False)
    return sorted(changes, key=lambda change: (not change.same_result, change.slowdown))


def advisor(model: nn.Module, args: Any) -> Callable[[Mapping[str, Any], str], list[str]]:
    """Returns a function of (batch, message of the failure) that names the three cheapest changes that free enough."""

    def advise(inputs: Mapping[str, Any], message: str) -> list[str]:
        asked = bytes_asked(message)
        changes = possible_changes(model, inputs, args)
        enough = [c for c in changes if c.frees >= asked]
        largest = sorted((c for c in changes if c.frees < asked), key=lambda c: -c.frees)
        return [f"{c.text} (frees about {human(c.frees)})" for c in (enough + largest)[:3]]

    return advise


def human(count: float) -> str:
    """Returns a number of bytes in binary units.

    >>> human(1536), human(3 << 30)
    ('1.5 KiB', '3.0 GiB')
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.1f} {unit}" if unit != "B" else f"{count:.0f} B"
        count /= 1024
    return f"{count:.1f} TiB"

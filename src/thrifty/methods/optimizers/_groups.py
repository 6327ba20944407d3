"""What the optimizer methods share: parameter groups as torch wants them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from thrifty.errors import NotApplicable


def clean(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The trainer's groups without `names`, which torch takes for a setting."""
    return [{key: value for key, value in group.items() if key != "names"} for group in groups]


def refuse_sharding(name: str, args: Any) -> None:
    """For optimizers that need whole tensors: row shards have other norms and other singular vectors."""
    if getattr(args, "fsdp", None) or getattr(args, "deepspeed", None):
        raise NotApplicable(
            f"{name}: it works on whole tensors, and FSDP or DeepSpeed keep shards of them",
            fix="use adamw or lion there, or train without sharding",
        )


def split(groups: list[dict[str, Any]], belongs: Callable[[str, torch.nn.Parameter], bool]) -> list[dict[str, Any]]:
    """Splits each group into the parameters for which `belongs` holds (first) and the others; empty parts go."""
    parts = []
    for wanted in (True, False):
        for group in groups:
            pairs = [(n, p) for n, p in zip(group["names"], group["params"], strict=True) if belongs(n, p) is wanted]
            if pairs:
                parts.append(
                    {**group, "names": [n for n, _ in pairs], "params": [p for _, p in pairs], "chosen": wanted}
                )
    return parts

"""What the optimizer methods share: parameter groups as torch wants them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from thrifty.architecture import block_linears, find_blocks
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


def hidden_groups(groups: list[dict[str, Any]], model: nn.Module | None, rank: int) -> list[dict[str, Any]]:
    """Splits the groups and gives each a `rank`: that of the projection for hidden matrices with sides above it, None
    for the others. Where the model is not known (a dry run of the optimizer alone), all matrices count as hidden.
    """
    if model is None:
        parts = split(groups, lambda name, p: p.ndim == 2 and min(p.shape) > rank)
    else:
        hidden = {id(m.weight) for blocks in find_blocks(model) for m in block_linears(blocks).values()}
        parts = split(groups, lambda name, p: id(p) in hidden and min(p.shape) > rank)
    for part in parts:
        part["rank"] = rank if part.pop("chosen") else None
        del part["names"]
    return parts


def check_rank(model: nn.Module, name: str, rank: int, value: int, fix: str) -> None:
    """Refuses a rank (for the method `name`, whose setting is `value`) that no trained matrix of the blocks exceeds.

    Raises:
        NotApplicable: Nothing would be of low rank.
    """
    trained: list[Any] = [m.weight for blocks in find_blocks(model) for m in block_linears(blocks).values()]
    if not any(weight.requires_grad and min(weight.shape) > rank for weight in trained):
        raise NotApplicable(
            f"{name}: no hidden matrix that is trained has sides above {rank}",
            key=f"methods.{name}.rank",
            value=value,
            fix=fix,
        )


def vocabulary_groups(groups: list[dict[str, Any]], model: Any) -> list[dict[str, Any]]:
    """Splits the groups and marks embeddings and language heads, whose first axis is a vocabulary, `vocabulary`."""
    found = set()
    if model is not None:
        found = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
        head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
        found |= {id(head.weight)} if head is not None else set()
    parts = split(groups, lambda name, p: id(p) in found)
    for part in parts:
        part["vocabulary"] = part.pop("chosen")
        del part["names"]
    return parts


def matrix_sides(matrix: torch.Tensor, group: dict[str, Any], longest: int) -> list[int]:
    """The axes of a matrix that a preconditioner works on: not a vocabulary, and none longer than `longest`."""
    candidates = (1,) if group["vocabulary"] else (0, 1)
    return [side for side in candidates if matrix.shape[side] <= longest]

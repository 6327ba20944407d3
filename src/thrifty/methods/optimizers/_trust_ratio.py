"""What LAMB and LARS share: a step per tensor that is proportional to the tensor's own norm."""

from __future__ import annotations

from typing import Any

import torch

from thrifty.methods.optimizers._groups import split


def trust_ratio(weight: torch.Tensor, update: torch.Tensor) -> torch.Tensor:
    """|weight| / |update|, and 1 where either is 0 (else a tensor that starts at zero would never move)."""
    w, u = weight.norm(), update.norm()
    return torch.where((w > 0) & (u > 0), w / u, torch.ones_like(w))


def adapted_groups(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Marks matrices `adapt`; vectors (biases, norms) take plain steps without decay."""
    parts = split(groups, lambda name, p: p.ndim >= 2)
    for part in parts:
        part["adapt"] = part.pop("chosen")
        if not part["adapt"]:
            part["weight_decay"] = 0.0
        del part["names"]
    return parts

"""NF4 in plain PyTorch: what a weight becomes when it is rounded to four bits."""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 64


def normal_float_codes() -> Tensor:
    """The 16 values of NF4: quantiles of N(0, 1), seven below zero, zero itself, eight above, divided by the largest.

    >>> [round(code, 3) for code in normal_float_codes().tolist()][:8]
    [-1.0, -0.696, -0.525, -0.395, -0.284, -0.185, -0.091, 0.0]
    """
    # The outermost quantile is half-way between those of 15 and of 16 equal shares.
    outer = 0.5 * (1 / 32 + 1 / 30)
    above = torch.special.ndtri(torch.linspace(1 - outer, 0.5, 9, dtype=torch.float64)[:-1])
    below = -torch.special.ndtri(torch.linspace(1 - outer, 0.5, 8, dtype=torch.float64)[:-1])
    codes = torch.cat([below, torch.zeros(1, dtype=torch.float64), above.flip(0)])
    return (codes / codes.abs().max()).float()


def round_to_nf4(weight: Tensor) -> Tensor:
    """The nearest values that NF4 can hold, with one scale for each 64 neighbours; same shape and data type."""
    codes = normal_float_codes().to(weight.device)
    flat = weight.detach().float().flatten()
    padded = torch.nn.functional.pad(flat, (0, -len(flat) % BLOCK)).view(-1, BLOCK)
    scale = padded.abs().amax(dim=1, keepdim=True)
    borders = (codes[1:] + codes[:-1]) / 2
    nearest = codes[torch.bucketize(padded / scale.clamp_min(torch.finfo(torch.float32).tiny), borders)]
    return (nearest * scale).flatten()[: len(flat)].view(weight.shape).to(weight.dtype)

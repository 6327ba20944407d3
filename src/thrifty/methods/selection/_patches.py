"""What the methods that run on some of an image's patches share."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor


def sample_noise(sample_ids: Tensor, count: int, *, seed: int, step: int) -> Tensor:
    """Uniform noise, float32 of shape (batch, count), that depends on seed, step and each sample's id only.

    So neither the size of a micro-batch, nor the number of processes, nor a resume changes what is masked.
    """
    rows = [
        np.random.Generator(np.random.Philox([seed, step, int(i) & (2**63 - 1), count])).random(count, dtype=np.float32)
        for i in sample_ids.tolist()
    ]
    return torch.from_numpy(np.stack(rows)).to(sample_ids.device)


def keep_patches(sequence: Tensor, noise: Tensor, kept: int) -> Tensor:
    """Drops patches: those with the `kept` smallest values of `noise` stay, in their order.

    Args:
        sequence: Shape (batch, prefix + patches, width). What stands before the patches (a class token) stays.
        noise: Shape (batch, patches).
        kept: Patches that stay.

    Returns:
        Shape (batch, prefix + kept, width).
    """
    prefix = sequence.shape[1] - noise.shape[1]
    index = noise.argsort(dim=1)[:, :kept].sort(dim=1).values
    chosen = sequence[:, prefix:].gather(1, index[..., None].expand(-1, -1, sequence.shape[2]))
    return torch.cat([sequence[:, :prefix], chosen], dim=1)


def noise_of(batch: dict[str, Any], count: int, ctx: Any) -> Tensor:
    """Noise for the patches of a batch in the coming step; from the global generator where samples have no id."""
    ids = batch.get("sample_id")
    if ids is None:
        return torch.rand(len(batch["pixel_values"]), count)
    return sample_noise(ids, count, seed=ctx.args.seed, step=ctx.step)

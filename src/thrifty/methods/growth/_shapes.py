"""What the methods share that shorten the rows or shrink the images of a batch."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from thrifty.method import Batch


def per_token(batch: Batch) -> dict[str, Tensor]:
    """The tensors of shape (rows, tokens)."""
    width = batch["input_ids"].shape[1]
    return {k: v for k, v in batch.items() if torch.is_tensor(v) and v.dim() >= 2 and v.shape[1] == width}


def truncate(batch: Batch, length: int) -> Batch:
    """The first `length` positions of each row.

    Args:
        batch: `input_ids` of shape (rows, tokens), and what else has that shape. Other entries stay.
        length: Tokens that are kept.
    """
    return {**batch, **{key: value[:, :length].contiguous() for key, value in per_token(batch).items()}}


def resize_images(pixels: Tensor, side: int) -> Tensor:
    """Images of shape (batch, channels, side, side), averaged where they shrink."""
    return nn.functional.interpolate(pixels, size=(side, side), mode="bilinear", antialias=True)

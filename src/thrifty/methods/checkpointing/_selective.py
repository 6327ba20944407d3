"""Recomputation by operation: results of matrix products and attention are kept, cheap operations run again."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

aten = torch.ops.aten
KEPT = {
    aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten.matmul, aten.linear, aten.convolution, aten._scaled_mm,
    aten._scaled_dot_product_flash_attention, aten._scaled_dot_product_efficient_attention,
    aten._scaled_dot_product_cudnn_attention, aten._scaled_dot_product_flash_attention_for_cpu,
    aten._flash_attention_forward, aten._efficient_attention_forward,
}  # fmt: skip


def keep_products(ctx: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """The policy: `MUST_SAVE` for products and attention, `PREFER_RECOMPUTE` for the rest."""
    if getattr(func, "overloadpacket", None) not in KEPT or _draws(func, args, kwargs):
        return CheckpointPolicy.PREFER_RECOMPUTE
    return CheckpointPolicy.MUST_SAVE


def _draws(func: Any, args: Any, kwargs: Any) -> bool:
    # Attention with dropout draws random numbers. If it were not run again, what is drawn after it would be other
    # numbers than in the forward pass.
    for index, argument in enumerate(func._schema.arguments):
        if argument.name == "dropout_p":
            return bool(args[index] if index < len(args) else kwargs.get("dropout_p", 0.0))
    return False


keep_products_context = functools.partial(create_selective_checkpoint_contexts, keep_products)
"""A `context_fn` for `torch.utils.checkpoint.checkpoint`."""

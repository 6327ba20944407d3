"""Plain attention in as few passes over the matrix of scores as PyTorch's operations allow."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.integrations.sdpa_attention import repeat_kv

PLAIN = "eager_attention_forward"
PLAIN_ARGUMENTS = ["module", "query", "key", "value", "attention_mask", "scaling", "dropout", "kwargs"]


class _Attention(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float) -> Any:
        scores = (query * scaling) @ key.mT
        weights = (scores if mask is None else scores + mask).softmax(-1).to(query.dtype)
        return weights @ value, weights

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        query, key, value, _, ctx.scaling = inputs
        ctx.save_for_backward(query, key, value, output[1])
        ctx.set_materialize_grads(False)  # the weights have a gradient only where somebody looks at them

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        query, key, value, weights = ctx.saved_tensors
        for_output, for_weights = gradients
        for_value = None
        if for_output is not None:
            for_value = weights.mT @ for_output
            through_output = for_output @ value.mT
            for_weights = through_output if for_weights is None else through_output + for_weights
        if for_weights is None:
            return (None,) * 5
        slopes = torch.ops.aten._softmax_backward_data(for_weights, weights, -1, weights.dtype) * ctx.scaling
        return slopes @ key, slopes.mT @ query, for_value, None, None


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float) -> tuple[Tensor, Tensor]:
    """`softmax(scaling * query key^T + mask) value`, all of it in the type of the inputs.

    The softmax itself computes in float32 in any case, without a float32 copy of the scores before it and another one
    after it, which transformers keeps for the backward pass.

    Args:
        query: Shape (batch, heads, length, width).
        key: Shape (batch, heads, keys, width), also `value`.
        value: The values.
        mask: Is added to the scores; of a shape that spreads to (batch, heads, length, keys). It gets no gradient.
        scaling: Of the scores.

    Returns:
        The result, shape (batch, heads, length, width), and the weights, shape (batch, heads, length, keys).
    """
    device = query.device.type
    if torch.is_autocast_enabled(device):  # which would choose other types in the forward pass than in the backward one
        dtype = torch.get_autocast_dtype(device)
        with torch.autocast(device, enabled=False):
            return attend(query.to(dtype), key.to(dtype), value.to(dtype), mask, scaling)
    made: Any = _Attention.apply(query, key, value, mask, scaling)
    return made


@functools.cache
def lean_attention(plain: Callable[..., Any]) -> Callable[..., Any] | None:
    """What can stand in for a model's plain attention, or None where it computes something else.

    Args:
        plain: transformers' `eager_attention_forward`, as the model's file has it.
    """

    def forward(
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float,
        dropout: float = 0.0,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor]:
        learnt = attention_mask is not None and attention_mask.requires_grad  # a bias of positions, say
        if dropout or learnt:
            return plain(module, query, key, value, attention_mask, scaling, dropout, **kwargs)
        groups = module.num_key_value_groups
        out, weights = attend(query, repeat_kv(key, groups), repeat_kv(value, groups), attention_mask, scaling)
        return out.transpose(1, 2).contiguous(), weights

    return forward if _computes_the_same(plain, forward) else None


def _computes_the_same(plain: Callable[..., Any], ours: Callable[..., Any]) -> bool:
    if list(inspect.signature(plain).parameters) != PLAIN_ARGUMENTS:
        return False
    rng = torch.Generator().manual_seed(0)
    query = torch.randn(2, 6, 5, 8, generator=rng, device="cpu")
    key, value = (torch.randn(2, 3, 5, 8, generator=rng, device="cpu") for _ in range(2))
    mask = torch.randn(2, 1, 5, 5, generator=rng, device="cpu")
    module = types.SimpleNamespace(num_key_value_groups=2, training=False)
    with torch.no_grad():
        try:
            theirs = plain(module, query, key, value, mask, 0.3)
        except RuntimeError:  # heads that share keys are unknown to it
            return False
        pairs = zip(theirs, ours(module, query, key, value, mask, 0.3), strict=True)
        return all(torch.allclose(a, b, atol=1e-6) for a, b in pairs)

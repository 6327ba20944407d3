"""Attention within samples that lie end to end in one row."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from thrifty.methods._dropout import kept


class Layout:
    """Tokens of the samples that lie end to end in the batch at hand; None for an ordinary batch.

    It is global, since a layer that is computed again in the backward pass may run in another thread.
    """

    lengths: list[int] | None = None
    starts: Tensor | None = None

    @classmethod
    def clear(cls) -> None:
        """What comes next is an ordinary batch."""
        cls.lengths = cls.starts = None


def attention_by_sample(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """SDPA within each sample of a row; an ordinary batch is left to transformers' own SDPA.

    Args:
        module: The attention module.
        query: (1, heads, tokens, width), also for the next two, with fewer heads.
        key: The same.
        value: The same.
        attention_mask: Of an ordinary batch.
        dropout: Of the attention weights.
        scaling: Of the scores.
        is_causal: Whether a token attends to earlier ones only; None asks the module.
        **kwargs: What the model passes on besides.

    Returns:
        (1, tokens, heads, width), and None in place of the weights.
    """
    if Layout.lengths is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, is_causal=is_causal, **kwargs
        )
    for unknown in ("softcap", "position_bias", "s_aux"):
        if kwargs.get(unknown) is not None:
            raise ValueError(f"attention by sample knows no {unknown}")
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    groups = query.shape[1] // key.shape[1]
    if groups > 1:  # on a CPU, heads that share keys would miss the fused kernel
        key, value = repeat_kv(key, groups), repeat_kv(value, groups)
    dtype = value.dtype
    # The processor's kernel has a backward pass in bfloat16 that takes several times that in float32.
    slow = value.device.type == "cpu" and dtype == torch.bfloat16
    if slow:
        query, key, value = query.float(), key.float(), value.float()
    with torch.autocast("cpu", enabled=False) if slow else contextlib.nullcontext():
        # No kernel of a processor knows dropout, and what stands in for one draws it number by number.
        inner = _with_dropout if dropout and value.device.type == "cpu" else _by_kernel
        parts = inner(query, key, value, causal, dropout, scaling, kwargs.get("sliding_window"))
    return torch.cat(parts, dim=2).transpose(1, 2).to(dtype), None


def _by_kernel(
    query: Tensor, key: Tensor, value: Tensor, causal: bool, dropout: float, scaling: float | None, window: int | None
) -> list[Tensor]:
    parts = []
    for q, k, v in zip(*(whole.split(Layout.lengths, dim=2) for whole in (query, key, value)), strict=True):
        mask = _window(q, window)
        parts.append(
            functional.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, dropout_p=dropout, scale=scaling, is_causal=causal and mask is None
            )
        )
    return parts


def _with_dropout(
    query: Tensor, key: Tensor, value: Tensor, causal: bool, dropout: float, scaling: float | None, window: int | None
) -> list[Tensor]:
    assert Layout.lengths is not None
    heads, width = query.shape[1], query.shape[-1]
    query = query * (width**-0.5 if scaling is None else scaling)
    sizes = [heads * length * length for length in Layout.lengths]
    factors = kept(sum(sizes), dropout, query.dtype, query.device).split(sizes)
    parts = []
    for q, k, v, factor in zip(*(x[0].split(Layout.lengths, dim=1) for x in (query, key, value)), factors, strict=True):
        scores = torch.bmm(q, k.transpose(1, 2))
        if causal:
            mask = _window(q[None], window)
            allowed = torch.ones_like(scores[0], dtype=torch.bool).tril() if mask is None else mask
            scores = scores.masked_fill(~allowed, float("-inf"))
        parts.append(torch.bmm(scores.softmax(dim=-1) * factor.view_as(scores), v)[None])
    return parts


def _window(query: Tensor, window: int | None) -> Tensor | None:
    """The mask of a causal sliding window, where the sample is longer than it."""
    length = query.shape[2]
    if window is None or length <= window:
        return None
    ones = torch.ones(length, length, dtype=torch.bool, device=query.device)
    return ones.tril() & ones.triu(1 - window)


def no_mask(*args: Any, **kwargs: Any) -> Tensor | None:
    """The mask that transformers makes of an ordinary batch; None for samples that lie end to end."""
    return sdpa_mask(*args, **kwargs) if Layout.lengths is None else None

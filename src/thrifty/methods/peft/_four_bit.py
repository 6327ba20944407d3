"""Linear layers whose weight is kept in four bits (NF4), and the way back to dense ones. Needs bitsandbytes."""

from __future__ import annotations

import contextlib
import copy
import functools
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from thrifty import _hf
from thrifty.architecture import block_linears, find_blocks
from thrifty.errors import NotApplicable

BLOCK = 64
SECOND_BLOCK = 256


def bitsandbytes(who: str) -> Any:
    """The library. Raises `NotApplicable` (for the method `who`) where it is not installed."""
    try:
        import bitsandbytes as library
    except ImportError as error:
        raise NotApplicable(f"{who}: needs bitsandbytes", fix="pip install thrifty[quant]") from error
    return library


def quantised_bytes(numel: int, double: bool = True) -> int:
    """Bytes of a weight in NF4: half a byte a number, and the scale of each block of 64.

    With double quantisation the scales take 8 bits, and 32 bits for each 256 of them; both code books and the mean are
    kept with each weight.

    >>> round(8 * quantised_bytes(4096 * 4096) / 4096**2, 3)
    4.127
    """
    blocks = -(-numel // BLOCK)
    scales = blocks + 4 * -(-blocks // SECOND_BLOCK) + 256 * 4 + 4 if double else 4 * blocks
    return -(-numel // 2) + scales + 16 * 4


def quantise(
    model: nn.Module,
    who: str,
    *,
    double: bool = True,
    compute_dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    planning: bool = False,
) -> list[str]:
    """Replaces every linear layer of the repeated blocks by one in NF4. Embeddings, norms and heads stay, and so does
    what the model asks to keep in full precision (T5's `wo`, whose data type its code reads), as in transformers.

    Args:
        model: A Hugging Face model.
        who: The method, for its errors.
        double: Quantise the blocks' scales too.
        compute_dtype: In which products are computed; None takes that of the weights.
        device: Where the quantised weights go, one layer after the other; None leaves them where they are.
        planning: Only take on the shapes and bytes.

    Returns:
        The names of the layers.
    """
    library = bitsandbytes(who)
    names = [
        name
        for blocks in find_blocks(model)
        for name in block_linears(blocks)
        if not _hf.stays_in_fp32(model, name, strict=False)
    ]
    if not names:
        raise NotApplicable(f"{who}: {type(model).__name__} has no linear layers in blocks", fix="use a Transformer")
    for name in names:
        old: Any = model.get_submodule(name)
        weight = old.weight.detach()
        if not weight.is_floating_point():
            raise NotApplicable(
                f"{who}: the weight of {name} is {weight.dtype}", fix="load the model without quantising"
            )
        weight = weight.T if isinstance(old, Conv1D) else weight
        layer = _layer_class(library)(
            weight.shape[1],
            weight.shape[0],
            bias=old.bias is not None,
            compute_dtype=compute_dtype or (None if planning else weight.dtype),
            compress_statistics=double,
            quant_type="nf4",
            device="meta",
        )
        if old.bias is not None:
            layer.bias = old.bias
        if planning:
            layer.plan(weight, double)
        else:
            layer.weight = library.nn.Params4bit(
                weight.contiguous(), requires_grad=False, quant_type="nf4", compress_statistics=double, module=layer
            ).to(device or weight.device)
        layer.original = (type(old), weight.dtype)
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, layer)
    return names


def dequantised(layer: Any) -> Tensor:
    """The weight (out, in) of a layer in four bits, in the data type it had."""
    from bitsandbytes import functional

    state = copy.copy(layer.weight.quant_state)
    # As one row: the library's kernels for CPUs begin a new block with each row, other than its quantiser, which gives
    # wrong weights where the row is no multiple of 64 (bitsandbytes 0.50).
    state.shape = torch.Size([math.prod(state.shape)])
    flat = functional.dequantize_4bit(layer.weight.data, state)
    return flat.view(layer.out_features, layer.in_features).to(layer.original[1])


@torch.no_grad()
def restore(model: nn.Module, changes: dict[str, Tensor]) -> nn.Module:
    """Replaces layers in four bits by dense ones with the dequantised weight plus a change (out, in), in place.

    The sum is taken in float32 and rounded once.
    """
    for name, layer in list(model.named_modules()):
        layer: Any
        if not hasattr(layer, "original"):
            continue
        kind, dtype = layer.original
        weight = dequantised(layer).float()
        if name in changes:
            weight = weight + changes[name].float()
        weight = weight.to(dtype)
        if kind is Conv1D:
            dense: Any = Conv1D(weight.shape[0], weight.shape[1])
            dense.weight = nn.Parameter(weight.T.contiguous())
        else:
            dense = nn.Linear(weight.shape[1], weight.shape[0], bias=layer.bias is not None, device="meta")
            dense.weight = nn.Parameter(weight)
        dense.bias = layer.bias
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, dense)
    return model


@contextlib.contextmanager
def known_as_four_bit(model: Any) -> Iterator[None]:
    """Inside, peft adds the adapters that it has for layers in four bits."""
    model.is_loaded_in_4bit = True
    try:
        yield
    finally:
        del model.is_loaded_in_4bit


class _DequantiseAndMultiply(torch.autograd.Function):
    """A product with a frozen weight that exists densely only while it is used, forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: Any) -> Tensor:
        ctx.layer = layer
        bias = None if layer.bias is None else layer.bias.to(x.dtype)
        return nn.functional.linear(x, layer.dense(x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] @ ctx.layer.dense(gradients[0].dtype), None


@functools.cache
def _layer_class(library: Any) -> type:
    class FourBitLinear(library.nn.Linear4bit):
        """The library's layer, with products of our own on CPUs (see `dequantised`) and in a dry run."""

        planned = False

        def plan(self, weight: Tensor, double: bool) -> None:
            """Takes on the bytes of a weight (out, in) and no more."""

            def empty(*shape: int, dtype: torch.dtype) -> Tensor:
                return torch.empty(*shape, dtype=dtype, device=weight.device)

            count = weight.numel()
            packed: Any = nn.Parameter(empty(-(-count // 2), 1, dtype=torch.uint8), requires_grad=False)
            packed.compress_statistics, packed.quant_type = double, "nf4"
            self.weight, self.planned = packed, True
            blocks = -(-count // BLOCK)
            self.register_buffer("absmax", empty(blocks, dtype=torch.uint8 if double else torch.float32))
            self.register_buffer("code", empty(16, dtype=torch.float32))
            if double:
                self.register_buffer("nested_absmax", empty(-(-blocks // SECOND_BLOCK), dtype=torch.float32))
                self.register_buffer("nested_code", empty(256, dtype=torch.float32))
                self.register_buffer("offset", empty(1, dtype=torch.float32))

        def dense(self, dtype: torch.dtype) -> Tensor:
            """The weight (out, in)."""
            if not self.planned:
                return dequantised(self).to(dtype)
            scales: Any = self.absmax
            if scales.dtype == torch.uint8:
                scales = scales.to(torch.float32).add_(self.offset)
            # One operation that reads half a byte a number and writes the dense weight.
            numbers = self.weight.expand(-1, 2).to(dtype).view(-1)
            return numbers[: self.out_features * self.in_features].view(self.out_features, self.in_features)

        def forward(self, x: Tensor) -> Tensor:
            if not self.planned and x.device.type != "cpu":
                return super().forward(x)
            dtype = self.compute_dtype or (
                # A dry run's methods are not told of the run's precision, but it shows here.
                torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else self.original[1]
            )
            product: Any = _DequantiseAndMultiply.apply(x.to(dtype), self)
            return product.to(x.dtype)

    return FourBitLinear

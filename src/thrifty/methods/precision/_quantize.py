"""Unbiased quantisation to 1, 2, 4 or 8 bits in groups, packed into bytes; and how to divide bits among tensors."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

WIDTHS = (1, 2, 4, 8)


@dataclass(frozen=True)
class Packed:
    """A quantised tensor: codes in bytes, and the range of each group in bfloat16.

    Args:
        data: (groups * size * bits / 8,) uint8.
        low: (groups,) smallest value, rounded down.
        step: (groups,) distance of two levels, rounded up.
        bits: 1, 2, 4 or 8.
        numel: Elements before padding.
        dtype: Of the original.
    """

    data: Tensor
    low: Tensor
    step: Tensor
    bits: int
    numel: int
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return self.data.nbytes + self.low.nbytes + self.step.nbytes


def quantize(x: Tensor, bits: int, *, size: int = 256, generator: torch.Generator | None = None) -> Packed:
    """Rounds each value up or down at random, so that its expectation is kept.

    Args:
        x: (n,) floating-point values.
        bits: 1, 2, 4 or 8.
        size: Values in a group, a multiple of 8.
        generator: Of the random numbers, on the device of `x`.
    """
    levels, n = 2**bits - 1, x.numel()
    # The same operations whatever the number of values, so that a dry run can extrapolate.
    codes = torch.empty(-(-n // size) * size, dtype=torch.float32, device=x.device)
    codes[:n].copy_(x)
    codes[n:].copy_(x[-1])
    codes = codes.view(-1, size)
    low = _round(codes.amin(1), -1)
    # The range must hold every value, or the largest would be cut off and the mean with it.
    step = _round((codes.amax(1) - low.float()) / levels, 1)
    safe = torch.where(step > 0, step, torch.ones_like(step)).float()
    codes.sub_(low.float()[:, None]).div_(safe[:, None])
    codes.add_(torch.rand(codes.shape, generator=generator, device=x.device)).floor_().clamp_(0, levels)
    small = codes.to(torch.uint8).view(-1, 8 // bits)
    del codes
    data = small[:, 0].clone()
    for place in range(1, 8 // bits):
        data.bitwise_or_(small[:, place] << (place * bits))
    return Packed(data, low, step, bits, n, x.dtype)


def dequantize(packed: Packed) -> Tensor:
    """(n,) values in the original data type."""
    bits = packed.bits
    mask = 2**bits - 1
    codes = torch.stack([(packed.data >> (place * bits)) & mask for place in range(8 // bits)], dim=1)
    values = codes.view(packed.low.numel(), -1).float()
    values.mul_(packed.step.float()[:, None]).add_(packed.low.float()[:, None])
    return values.view(-1)[: packed.numel].to(packed.dtype)


def _round(x: Tensor, direction: int) -> Tensor:
    """To bfloat16, down (-1) or up (1); what is a bfloat16 number already stays."""
    near = x.to(torch.bfloat16)
    beyond = (x + direction * x.abs() * 2**-7).to(torch.bfloat16)
    wrong = near > x if direction < 0 else near < x
    return torch.where(wrong, beyond, near)


def allocate(sensitivity: Sequence[float], sizes: Sequence[int], average: float) -> list[int]:
    """Divides bits so that the variance of the gradient is small: the sum of c * 4^-(b - 1), GACT's model.

    Args:
        sensitivity: Variance c that each tensor causes at one bit.
        sizes: Elements of each tensor.
        average: Bits an element on the whole.

    Returns:
        Bits of each tensor, of `WIDTHS`.
    """
    bits = [WIDTHS[0]] * len(sizes)
    room = average * sum(sizes) - sum(sizes)

    def offer(index: int) -> tuple[float, int] | None:
        at = WIDTHS.index(bits[index])
        if at + 1 == len(WIDTHS):
            return None
        gain = sensitivity[index] * (4.0 ** -(WIDTHS[at] - 1) - 4.0 ** -(WIDTHS[at + 1] - 1))
        return -gain / (sizes[index] * (WIDTHS[at + 1] - WIDTHS[at])), index

    queue = [entry for entry in map(offer, range(len(sizes))) if entry is not None]
    heapq.heapify(queue)
    while queue:
        _, index = heapq.heappop(queue)
        wider = WIDTHS[WIDTHS.index(bits[index]) + 1]
        cost = sizes[index] * (wider - bits[index])
        if cost > room:
            continue
        room -= cost
        bits[index] = wider
        following = offer(index)
        if following is not None:
            heapq.heappush(queue, following)
    # Steps are uneven, so that equal bits may be better by the last one.
    equal = [max(width for width in WIDTHS if width <= average)] * len(sizes)
    return min((bits, equal), key=lambda some: sum(c * 4.0 ** -(b - 1) for c, b in zip(sensitivity, some, strict=True)))

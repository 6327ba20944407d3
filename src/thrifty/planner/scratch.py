"""Memory that CPU kernels take inside themselves, measured by running the kernel once on this machine.

Convolutions, products in half precision and attention reorder their operands into layouts that oneDNN chooses by
processor and number of threads; no rule gives their size. So those kernels are run for real, on zeros of the traced
shapes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from thrifty.planner._private import profiled_allocations, real_tensors, tree_map

aten = torch.ops.aten
_ALWAYS = (
    aten.convolution.default,
    aten.convolution_backward.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
)
_IN_HALF_PRECISION = (aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default)
# Above this, running a product takes longer than its scratch is worth beside its operands.
_LARGEST_PRODUCT = 2e10
_known: dict[tuple[Any, ...], int] = {}


def scratch_bytes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], flops: float) -> int:
    """Returns the bytes that the CPU kernel of `func` holds at its worst beyond its outputs; 0 for kernels without
    scratch.

    Args:
        func: The operation.
        args: Its positional arguments, fake or on `meta`.
        kwargs: Its keyword arguments.
        flops: Its floating-point operations.
    """
    if func not in _ALWAYS and (
        func not in _IN_HALF_PRECISION or args[-1].dtype not in (torch.bfloat16, torch.float16)
    ):
        return 0
    if flops > _LARGEST_PRODUCT:
        return 0
    key = (func, *map(_shape, args), *((name, _shape(value)) for name, value in kwargs.items()))
    if key not in _known:
        _known[key] = _measure(func, args, kwargs)
    return _known[key]


def _measure(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    with real_tensors():
        real_args, real_kwargs = tree_map(_real, args), tree_map(_real, kwargs)
        # The first call makes what oneDNN then keeps.
        func(*real_args, **real_kwargs)
        activity = torch.profiler.ProfilerActivity.CPU
        with torch.profiler.profile(activities=[activity], profile_memory=True) as profile:
            out = func(*real_args, **real_kwargs)
        outputs = [t for t in (out if isinstance(out, tuple) else (out,)) if isinstance(t, torch.Tensor)]
        kept = sum(t.untyped_storage().nbytes() for t in outputs)
    changes = np.cumsum(profiled_allocations(profile))
    return max(0, int(changes.max()) - kept) if len(changes) else 0


def _shape(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), tuple(value.stride()), value.dtype
    return tuple(value) if isinstance(value, list) else value


def _real(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cpu").zero_()
    return value

"""What one traced operation costs: floating-point operations, bytes moved, the sizes of its matrix product."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

from thrifty.planner._private import flop_registry

OP_FIELDS = ("flops", "read", "written", "b", "m", "n", "k")
Record = tuple[str, str, tuple[float, ...], tuple[float, ...], tuple[float, ...]]

# Operations that only make a tensor's description, or memory that nobody writes yet.
_FREE_OPS = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view", "_reshape_alias",
             "lift_fresh", "detach", "detach_", "alias", "set_", "_local_scalar_dense", "resize_"}  # fmt: skip
# Look-ups read the rows that they return, not the table.
_LOOKUPS = {"embedding", "index", "index_select", "gather"}


class OpCoster:
    """Turns a dispatched operation into its record; what costs nothing (views, empty) gives None."""

    def __init__(self) -> None:
        self._known: dict[Any, tuple[str, str, bool, Callable[..., int] | None]] = {}

    def __call__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Record | None:
        """Returns (name, dtype, numbers in the order of `OP_FIELDS`, bytes of each input, bytes of each output)."""
        name, short, free, formula = self._facts(func)
        if free:
            return None
        outputs = list(_tensors(out))
        inputs = list(_tensors(args)) + list(_tensors(tuple(kwargs.values())))
        writes = tuple(map(float, map(_touched, outputs)))
        written = sum(writes)
        if short in _LOOKUPS:
            reads = (written, *map(float, map(_touched, inputs[1:])))
        else:
            reads = tuple(map(float, map(_touched, inputs)))
        flops = float(formula(*args, **kwargs, out_val=out)) if formula is not None else 0.0
        sizes = _product_sizes(short, inputs)
        if short == "on_host":
            sizes = (0.0, 0.0, 0.0, float(args[1]))
        first = next((t for t in inputs if t.is_floating_point()), inputs[0] if inputs else (outputs or [None])[0])
        dtype = str(first.dtype).removeprefix("torch.") if first is not None else "none"
        return name, dtype, (flops, sum(reads), written, *sizes), reads, writes

    def is_free(self, func: Any) -> bool:
        """Whether an operation costs nothing, whatever its arguments."""
        return self._facts(func)[2]

    def _facts(self, func: Any) -> tuple[str, str, bool, Callable[..., int] | None]:
        known = self._known.get(func)
        if known is None:
            name = str(func).rsplit(".", 1)[0]
            short = name.split(".", 1)[1]
            free = short in _FREE_OPS or bool(getattr(func, "is_view", False)) or name.startswith("prim")
            known = self._known[func] = (name, short, free, _flop_formula(func, short))
        return known


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, (list, tuple)):
        for value in values:
            yield from _tensors(value)


def _touched(tensor: torch.Tensor) -> int:
    """Bytes of memory behind a tensor: an expanded one is read once from its small storage."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def _product_sizes(short: str, inputs: list[torch.Tensor]) -> tuple[float, float, float, float]:
    """(batch, m, n, k) of a matrix product; zeros for everything else."""
    if short in ("addmm", "baddbmm"):
        left, right = inputs[1], inputs[2]
    elif short in ("mm", "bmm", "_grouped_mm", "grouped_mm_fallback"):
        left, right = inputs[0], inputs[1]
    else:
        return 0.0, 0.0, 0.0, 0.0
    if left.dim() == 2 and right.dim() == 2:
        return 1.0, float(left.shape[0]), float(right.shape[1]), float(left.shape[1])
    if left.dim() == 3 and right.dim() == 3:
        return float(left.shape[0]), float(left.shape[1]), float(right.shape[2]), float(left.shape[2])
    groups = float((right if right.dim() == 3 else left).shape[0])
    rows = left.shape[-2] / groups if left.dim() == 2 else left.shape[-2]
    return groups, float(rows), float(right.shape[-1]), float(left.shape[-1])


def _flop_formula(func: Any, short: str) -> Callable[..., int] | None:
    if short in _FLOPS:
        return _FLOPS[short]
    packet = getattr(func, "_overloadpacket", None)
    return flop_registry.get(packet) if packet is not None else None


def _attention_flops(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any) -> int:
    scores = query.shape[-2] * key.shape[-2]
    return 2 * math.prod(query.shape[:-2]) * scores * (query.shape[-1] + value.shape[-1])


def _attention_backward_flops(
    gradient: torch.Tensor, query: torch.Tensor, key: torch.Tensor, *args: Any, **kw: Any
) -> int:
    # Recomputes the scores, then makes the gradients of scores, query, key and value: five products for the two of
    # forward.
    scores = query.shape[-2] * key.shape[-2]
    return 2 * math.prod(query.shape[:-2]) * scores * 5 * query.shape[-1]


def _grouped_flops(left: torch.Tensor, right: torch.Tensor, *args: Any, **kwargs: Any) -> int:
    # Rows (or, for the gradient of the weights, the shared dimension) are dealt out among the groups: each counts once.
    return 2 * math.prod(left.shape[-2:]) * right.shape[-1]


_FLOPS: dict[str, Callable[..., int]] = {
    "_scaled_dot_product_flash_attention_for_cpu": _attention_flops,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward_flops,
    "_grouped_mm": _grouped_flops,
    "grouped_mm_fallback": _grouped_flops,
}

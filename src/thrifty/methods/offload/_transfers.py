"""Operations that stand for copies between host and device in a dry run, so that the planner can price the link.

They run on fake tensors only: what they return has the right shape, and the host's memory is not counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

_LIBRARY = torch.library.Library("thrifty", "DEF")
_LIBRARY.define("to_host(Tensor x) -> Tensor")
_LIBRARY.define("to_device(Tensor like, SymInt[] shape, ScalarType dtype) -> Tensor")
_LIBRARY.define("on_host(Tensor x, float bytes) -> Tensor")


def _to_host(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(0)


def _to_device(like: torch.Tensor, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return like.new_empty(shape, dtype=dtype)


def _on_host(x: torch.Tensor, nbytes: float) -> torch.Tensor:
    return x.new_empty(0)


for _name, _run in (("to_host", _to_host), ("to_device", _to_device), ("on_host", _on_host)):
    _LIBRARY.impl(_name, _run, "CompositeExplicitAutograd")

_OPS: Any = torch.ops.thrifty


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of `tensor` goes to the host; returns a handle without memory."""
    return _OPS.to_host(tensor.detach())


def to_device(handle: torch.Tensor, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor comes from the host."""
    return _OPS.to_device(handle, list(shape), dtype)


def on_host(tensor: torch.Tensor, nbytes: float) -> None:
    """The host reads and writes `nbytes` of its own memory."""
    _OPS.on_host(tensor.detach(), float(nbytes))

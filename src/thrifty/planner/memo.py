"""Remembers what an operation on tensors without values gives, so that it is worked out once in a process.

A shape function costs some tenths of a millisecond in Python, and a search asks it the same question thousands of
times: in every block, in every structural class.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple

import torch

from thrifty.planner._private import FakeTensor, FakeTensorMode, fake_empty, storage_key, tree_leaves
from thrifty.planner.dialect import dispatch
from thrifty.planner.opcost import OpCoster, Record

_MOST = 200_000
_META = torch.device("meta")
# Other classes of tensors have insides that their description does not tell.
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_DEVICE = torch.ops.prim.device.default


class _New(NamedTuple):
    """A tensor in memory of its own."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class _Same(NamedTuple):
    """The argument of this index among all leaves of the arguments (an in-place operation)."""

    index: int


class _Plain(NamedTuple):
    """Not a tensor."""

    value: Any


class _Entry(NamedTuple):
    container: type | None
    """Of the output; None for a single leaf."""
    leaves: tuple[_New | _Same | _Plain, ...]
    record: Record | None


class Memo:
    """Runs operations, or answers from memory.

    What aliases its input (views), what changes the shape of an argument and what has values (real tensors, constants)
    is always run.
    """

    def __init__(self) -> None:
        self._entries: dict[Hashable, _Entry | None] = {}
        self._coster = OpCoster()

    def run(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, cuda: bool, mode: FakeTensorMode | None
    ) -> tuple[Any, Record | None]:
        """Returns the output of `func` and what it costs.

        Args:
            func: The dispatched operation.
            args: Its positional arguments.
            kwargs: Its keyword arguments.
            cuda: As for `dispatch`.
            mode: The mode of fake tensors, or None for tensors on `meta`.
        """
        if func is _DEVICE and isinstance(args[0], FakeTensor):
            return args[0].fake_device, None
        if self._coster.is_free(func):
            # These are quicker run than looked up, and most of them alias their input.
            return dispatch(func, args, kwargs, cuda=cuda), None
        try:
            key = (func, cuda, mode is None, _describe(args), _describe(tuple(kwargs.items())) if kwargs else None)
            entry = self._entries.get(key, _MISSING)
        except (TypeError, _HasValues):
            key, entry = None, None
        if entry is not None and entry is not _MISSING:
            return _rebuilt(entry, args, kwargs, mode), entry.record
        out = dispatch(func, args, kwargs, cuda=cuda)
        record = self._coster(func, args, kwargs, out)
        if key is not None and entry is _MISSING:
            if len(self._entries) >= _MOST:
                self._entries.clear()
            unchanged = key[3] == _describe(args)
            self._entries[key] = _entry(args, kwargs, out, record, mode) if unchanged else None
        return out, record


class _HasValues(Exception):
    """A tensor whose values or insides the result may depend on."""


_MISSING: Any = object()


def _describe(value: Any) -> Hashable:
    """All of an argument that a shape function or a cost can depend on."""
    if isinstance(value, torch.Tensor):
        if isinstance(value, FakeTensor):
            if value.constant is not None:
                raise _HasValues
        elif type(value) not in _PLAIN or value.device != _META:
            raise _HasValues
        return value.shape, value.stride(), value.dtype, value.untyped_storage().nbytes()
    if isinstance(value, (list, tuple)):
        return tuple(map(_describe, value))
    # The type belongs to it: 2 and 2.0 are equal, but promote types differently.
    return value.__class__, value


def _entry(
    args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, record: Record | None, mode: FakeTensorMode | None
) -> _Entry | None:
    """What `_rebuilt` needs, or None where the output cannot be made from a description."""
    given = tree_leaves((args, kwargs))
    taken = {storage_key(t.untyped_storage()) for t in given if isinstance(t, torch.Tensor)}
    single = not isinstance(out, (list, tuple))
    leaves: list[_New | _Same | _Plain] = []
    for value in (out,) if single else out:
        if not isinstance(value, torch.Tensor):
            if not isinstance(value, (int, float, bool, type(None))):
                return None
            leaves.append(_Plain(value))
            continue
        index = next((i for i, other in enumerate(given) if other is value), None)
        if index is not None:
            leaves.append(_Same(index))
            continue
        storage = value.untyped_storage()
        if storage_key(storage) in taken or value.layout != torch.strided or not _is_plain(value, mode):
            return None
        taken.add(storage_key(storage))
        leaf = _New(tuple(value.shape), value.stride(), value.dtype, value.device)
        if _empty(leaf, mode).untyped_storage().nbytes() != storage.nbytes():
            return None
        leaves.append(leaf)
    return _Entry(None if single else type(out), tuple(leaves), record)


def _is_plain(value: torch.Tensor, mode: FakeTensorMode | None) -> bool:
    if not all(isinstance(n, int) for n in value.shape):
        return False
    if mode is None:
        return type(value) in _PLAIN and value.device == _META
    return isinstance(value, FakeTensor) and value.constant is None


def _rebuilt(entry: _Entry, args: tuple[Any, ...], kwargs: dict[str, Any], mode: FakeTensorMode | None) -> Any:
    made: list[Any] = []
    for leaf in entry.leaves:
        if isinstance(leaf, _New):
            made.append(_empty(leaf, mode))
        elif isinstance(leaf, _Same):
            made.append(tree_leaves((args, kwargs))[leaf.index])
        else:
            made.append(leaf.value)
    return made[0] if entry.container is None else entry.container(made)


def _empty(leaf: _New, mode: FakeTensorMode | None) -> torch.Tensor:
    if mode is not None:
        return fake_empty(mode, leaf.shape, leaf.stride, leaf.dtype, leaf.device)
    return torch.empty_strided(leaf.shape, leaf.stride, dtype=leaf.dtype, device=_META)

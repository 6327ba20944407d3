"""Records every allocation, free and operation of a training step, in order.

Nothing is computed and no memory is taken: tensors have shapes, types and lifetimes only. The order of allocations and
frees is that of the real step, since the very same Python and C++ code decides it.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from thrifty.planner._private import FakeTensorMode, TorchDispatchMode, storage_key, tree_leaves
from thrifty.planner.memo import Memo
from thrifty.planner.opcost import OP_FIELDS, Record
from thrifty.planner.scratch import scratch_bytes

ALLOC, FREE, OP, ACCUMULATED = 0, 1, 2, 3
CATEGORIES = ("parameters", "gradients", "optimizer", "activations", "temporaries", "other")
PARAMETERS, GRADIENTS, OPTIMIZER, ACTIVATIONS, TEMPORARIES, OTHER = range(6)
DIRECTIONS = ("start", "forward", "recompute", "backward", "optimizer")
START, FORWARD, RECOMPUTE, BACKWARD, UPDATE = range(5)


@dataclass
class Trace:
    """The record of one step.

    Attributes:
        kind: (events,) ALLOC, FREE, OP or ACCUMULATED (a gradient reached its parameter).
        ident: (events,) index of the allocation or of the operation.
        direction: (events,) index into `DIRECTIONS`.
        place: (events,) index into `places`.
        places: Names of modules, as a reader of the model knows them.
        nbytes: (allocations,) requested bytes, not rounded.
        category: (allocations,) index into `CATEGORIES`.
        source: (allocations,) name of the operation that allocated.
        op_names: (operations,) `aten.mm` and the like.
        op_dtypes: (operations,) data type of the first tensor.
        op_numbers: (operations, len(OP_FIELDS)) floating-point operations, bytes and matrix sizes.
        op_reads: (reads,) bytes read of each input of each operation.
        op_of_read: (reads,) to which operation an input belongs.
        op_writes: (writes,) bytes written of each output of each operation.
        op_of_write: (writes,) to which operation an output belongs.
        start: Index of the first event of the step; the events before it are what lives when it starts.
        parameters: Shape, data type, whether trainable, of each parameter in order.
    """

    kind: np.ndarray
    ident: np.ndarray
    direction: np.ndarray
    place: np.ndarray
    places: list[str]
    nbytes: np.ndarray
    category: np.ndarray
    source: list[str]
    op_names: list[str]
    op_dtypes: list[str]
    op_numbers: np.ndarray
    op_reads: np.ndarray
    op_of_read: np.ndarray
    op_writes: np.ndarray
    op_of_write: np.ndarray
    start: int
    parameters: list[tuple[tuple[int, ...], str, bool]]


_MEMO = Memo()
_hidden = False


@contextlib.contextmanager
def unmaterialised() -> Iterator[None]:
    """What operations inside make never reaches memory: a fused kernel keeps it to itself."""
    global _hidden
    before, _hidden = _hidden, True
    try:
        yield
    finally:
        _hidden = before


@dataclass
class _Log:
    kind: list[int] = field(default_factory=list)
    ident: list[int] = field(default_factory=list)
    direction: list[int] = field(default_factory=list)
    place: list[int] = field(default_factory=list)


class Recorder(TorchDispatchMode):
    """Logs allocations and frees of storages, and operations, while it is the active dispatch mode.

    Args:
        cuda: Whether to give outputs the types that CUDA gives them; otherwise what CPU kernels allocate inside
            themselves is
            measured and logged too.
        mode: The mode of fake tensors that is active outside, or None for tensors on `meta`.
    """

    def __init__(self, *, cuda: bool = True, mode: FakeTensorMode | None = None) -> None:
        super().__init__()
        self.log = _Log()
        self._cuda, self._mode = cuda, mode
        self.direction, self.place = START, 0
        self.places: list[str] = [""]
        self._place_ids: dict[str, int] = {"": 0}
        self.living: dict[int, int] = {}
        self.nbytes: list[int] = []
        self.source: list[str] = []
        self.category: dict[int, int] = {}
        self.ops: list[Record] = []
        self.enabled = True

    def at(self, direction: int, name: str) -> None:
        """Says where in the step the following events happen."""
        self.direction = direction
        if name not in self._place_ids:
            self._place_ids[name] = len(self.places)
            self.places.append(name)
        self.place = self._place_ids[name]

    def _write(self, kind: int, ident: int) -> None:
        log = self.log
        log.kind.append(kind)
        log.ident.append(ident)
        log.direction.append(self.direction)
        log.place.append(self.place)

    def _freed(self, key: int, ident: int) -> None:
        if self.living.get(key) == ident:
            del self.living[key]
            if self.enabled:
                self._write(FREE, ident)

    def track(self, tensor: torch.Tensor, source: str, category: int | None = None) -> int:
        """Records the storage of `tensor` as allocated now, unless it is known; returns the index of the allocation."""
        storage = tensor.untyped_storage()
        key = storage_key(storage)
        ident = self.living.get(key)
        if ident is None:
            ident = self.living[key] = len(self.nbytes)
            self.nbytes.append(storage.nbytes())
            self.source.append(source)
            self._write(ALLOC, ident)
            weakref.finalize(storage, self._freed, key, ident)
        if category is not None:
            self.category[ident] = category
        return ident

    def mark_accumulated(self, parameter: torch.Tensor) -> None:
        """Records that the gradient of `parameter` has been added to its `.grad`."""
        if parameter.grad is not None:
            self._write(ACCUMULATED, self.track(parameter.grad, "accumulate"))

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Nothing is compiled here, and the guard against it costs as much as an operation.
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Kernels know nothing of function modes; without this every look at a tensor would pass through them.
        with torch._C.DisableTorchFunction():
            return self._record(func, args, kwargs or {})

    def _record(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out, record = _MEMO.run(func, args, kwargs, cuda=self._cuda, mode=self._mode)
        if not self.enabled:
            return out
        if self.direction == BACKWARD or self.direction == RECOMPUTE:
            # Backward formulas run without gradients; recomputed forward code runs with them.
            self.direction = RECOMPUTE if torch.is_grad_enabled() else BACKWARD
        if record is not None:
            self._write(OP, len(self.ops))
            self.ops.append(record)
        if _hidden:
            return out
        source = record[0] if record is not None else str(func)
        if isinstance(out, torch.Tensor):
            self.track(out, source)
        elif isinstance(out, (list, tuple)):
            for leaf in tree_leaves(out):
                if isinstance(leaf, torch.Tensor):
                    self.track(leaf, source)
        if not self._cuda and record is not None:
            self._log_scratch(scratch_bytes(func, args, kwargs, record[2][0]), source)
        return out

    def _log_scratch(self, nbytes: int, source: str) -> None:
        if nbytes:
            self.nbytes.append(nbytes)
            self.source.append(f"{source} scratch")
            self._write(ALLOC, len(self.nbytes) - 1)
            self._write(FREE, len(self.nbytes) - 1)

    def clear(self) -> None:
        """Forgets the history: what lives now is what the step starts from, in the order of its allocation."""
        alive = sorted(self.living.values())
        self.log = _Log()
        self.direction, self.place = START, 0
        for ident in alive:
            self._write(ALLOC, ident)

    def trace(self, start: int, parameters: list[tuple[tuple[int, ...], str, bool]]) -> Trace:
        """Returns what has been recorded. Allocations without a known category are activations if they were made by
        forward code and freed by the backward pass, else temporaries."""
        kind = np.array(self.log.kind, np.int8)
        ident = np.array(self.log.ident, np.int32)
        direction = np.array(self.log.direction, np.int8)
        _order_frees(kind, ident, direction)
        born = np.full(len(self.nbytes), START, np.int8)
        died = np.full(len(self.nbytes), START, np.int8)
        born[ident[kind == ALLOC]] = direction[kind == ALLOC]
        died[ident[kind == FREE]] = direction[kind == FREE]
        forward = (born == FORWARD) | (born == RECOMPUTE)
        category = np.where(forward & (died == BACKWARD), ACTIVATIONS, TEMPORARIES)
        category[born == START] = OTHER
        for key, value in self.category.items():
            category[key] = value
        return Trace(
            kind=kind,
            ident=ident,
            direction=direction,
            place=np.array(self.log.place, np.int16),
            places=list(self.places),
            nbytes=np.array(self.nbytes, np.float64),
            category=category.astype(np.int8),
            source=list(self.source),
            op_names=[op[0] for op in self.ops],
            op_dtypes=[op[1] for op in self.ops],
            op_numbers=np.array([op[2] for op in self.ops], np.float64).reshape(-1, len(OP_FIELDS)),
            op_reads=np.array([part for op in self.ops for part in op[3]], np.float64),
            op_of_read=np.array([at for at, op in enumerate(self.ops) for _ in op[3]], np.int64),
            op_writes=np.array([part for op in self.ops for part in op[4]], np.float64),
            op_of_write=np.array([at for at, op in enumerate(self.ops) for _ in op[4]], np.int64),
            start=start,
            parameters=parameters,
        )


def _order_frees(kind: np.ndarray, ident: np.ndarray, direction: np.ndarray) -> None:
    """Puts neighbouring frees into the order of their allocation, in place.

    Where many tensors die at once (the cache of autocast) their order is that of a hash table, which says nothing.
    """
    same = (kind[1:] == FREE) & (kind[:-1] == FREE) & (direction[1:] == direction[:-1])
    edges = np.flatnonzero(np.diff(np.concatenate([[0], same.astype(np.int8), [0]])))
    for start, stop in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
        ident[start : stop + 1].sort()

"""How a trace grows with the number of equal blocks: which stretches of events one more block inserts, and where.

Two traces, one with one block more, are aligned. What is left over are a few contiguous stretches: the forward pass of
one block, its backward pass, its parameters, its part of the optimizer step. Repeating each of them gives the trace of
any depth.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from difflib import SequenceMatcher

import numpy as np

from thrifty.errors import ThriftyError
from thrifty.planner.trace import ACCUMULATED, ALLOC, FREE, OP, Trace


class TraceMismatch(ThriftyError):
    """Two traces that should be alike are not, so the cost cannot be extrapolated from them."""


@dataclass
class Chunk:
    """A stretch of events that every further block of one kind inserts.

    Attributes:
        dim: Name of the count, e.g. `num_hidden_layers`.
        position: It goes before the base trace's event of this index.
        events: (n,) indices of its events in the larger trace.
        like: (n,) for allocations, frees and operations: the index of the allocation or operation of the base trace
            that it
            equals.
    """

    dim: str
    position: int
    events: np.ndarray
    like: np.ndarray


@dataclass
class Growth:
    """Everything that one more block changes.

    Attributes:
        chunks: The inserted stretches, in order.
        grown: Allocations of the base trace whose size changes with the count (a list of one number a parameter), as
            {allocation: further bytes a block}.
        grown_ops: Operations over a list of all parameters, as {operation: further numbers a block}.
    """

    chunks: list[Chunk] = field(default_factory=list)
    grown: dict[int, float] = field(default_factory=dict)
    grown_ops: dict[int, np.ndarray] = field(default_factory=dict)


def signatures(
    trace: Trace, table: dict[tuple[object, ...], int], sizeless: Collection[tuple[bool, str]] = ()
) -> np.ndarray:
    """Returns (events,) integers that are equal where events look the same.

    Args:
        trace: The trace.
        table: Shared among the traces to compare.
        sizeless: (True, operation) and (False, operation that allocates) whose sizes do not count.
    """

    def number(key: tuple[object, ...]) -> int:
        return table.setdefault(key, len(table))

    allocations = [
        number((source, category, None if (False, source) in sizeless else nbytes))
        for source, category, nbytes in zip(trace.source, trace.category.tolist(), trace.nbytes.tolist(), strict=True)
    ]
    operations = [
        number((name, dtype, None if (True, name) in sizeless else tuple(numbers)))
        for name, dtype, numbers in zip(trace.op_names, trace.op_dtypes, trace.op_numbers.tolist(), strict=True)
    ]
    # Whoever made it, one freed tensor is like another of its size.
    frees = [
        number((category, None if (False, source) in sizeless else nbytes))
        for source, category, nbytes in zip(trace.source, trace.category.tolist(), trace.nbytes.tolist(), strict=True)
    ]
    of = {ALLOC: allocations, FREE: frees, ACCUMULATED: allocations, OP: operations}
    out = np.empty(len(trace.kind), np.int64)
    events = zip(trace.kind.tolist(), trace.ident.tolist(), trace.direction.tolist(), strict=True)
    for at, (kind, ident, direction) in enumerate(events):
        out[at] = number((kind, of[kind][ident], direction))
    return out


def growth(base: Trace, larger: Trace, dim: str) -> Growth:
    """Aligns two traces of which `larger` has one more block of the kind `dim` (or one more period of blocks).

    Raises:
        TraceMismatch: The traces differ by more than insertions.
    """
    sizeless: set[tuple[bool, str]] = set()
    while True:
        table: dict[tuple[object, ...], int] = {}
        left, right = signatures(base, table, sizeless), signatures(larger, table, sizeless)
        opcodes = SequenceMatcher(None, left.tolist(), right.tolist(), autojunk=False).get_opcodes()
        faults = [code for code in opcodes if code[0] in ("replace", "delete")]
        if not faults:
            break
        # Operations over all parameters at once (stacking norms, foreach updates) grow instead of being repeated.
        names = {_name(base, at) for _, i1, i2, _, _ in faults for at in range(i1, i2)} - sizeless
        if not names:
            _, i1, i2, j1, j2 = faults[0]
            raise TraceMismatch(f"one more {dim} changes events: {_show(base, i1, i2)} became {_show(larger, j1, j2)}")
        sizeless |= names
    result = Growth()
    for tag, i1, i2, j1, j2 in opcodes:
        if tag == "equal":
            _note_growth(base, larger, i1, j1, i2 - i1, result)
        else:
            result.chunks.append(_chunk(base, larger, left, right, dim, i1, j1, j2))
    return result


def _chunk(
    base: Trace, larger: Trace, left: np.ndarray, right: np.ndarray, dim: str, position: int, start: int, stop: int
) -> Chunk:
    length = stop - start
    events = np.arange(start, stop)
    wanted = right[start:stop]
    like = np.full(length, -1, np.int64)
    for at in (position - length, position):
        # The neighbour of which the inserted stretch is a copy.
        if at >= 0 and at + length <= len(left) and np.array_equal(left[at : at + length], wanted):
            return Chunk(dim, position, events, base.ident[at : at + length].astype(np.int64))
    # A copy of more than one neighbour (the stretch may begin anywhere in the period): take equals, nearest first.
    order = np.argsort(np.abs(np.arange(len(left)) - position), kind="stable")
    nearest: dict[int, int] = {}
    for at in order.tolist():
        nearest.setdefault(int(left[at]), at)
    for index, signature in enumerate(wanted.tolist()):
        if signature not in nearest:
            raise TraceMismatch(f"one more {dim} brings an event that no other block has: {_show(larger, start, stop)}")
        like[index] = base.ident[nearest[signature]]
    return Chunk(dim, position, events, like)


def _note_growth(base: Trace, larger: Trace, i: int, j: int, length: int, result: Growth) -> None:
    for at in range(length):
        kind, ident, other = int(base.kind[i + at]), int(base.ident[i + at]), int(larger.ident[j + at])
        if kind == ALLOC and larger.nbytes[other] != base.nbytes[ident]:
            result.grown[ident] = float(larger.nbytes[other] - base.nbytes[ident])
        elif kind == OP and not np.array_equal(larger.op_numbers[other], base.op_numbers[ident]):
            result.grown_ops[ident] = larger.op_numbers[other] - base.op_numbers[ident]


def _name(trace: Trace, at: int) -> tuple[bool, str]:
    ident = int(trace.ident[at])
    return (True, trace.op_names[ident]) if trace.kind[at] == OP else (False, trace.source[ident])


def _show(trace: Trace, start: int, stop: int, limit: int = 4) -> str:
    words = []
    for at in range(start, min(stop, start + limit)):
        kind, ident = int(trace.kind[at]), int(trace.ident[at])
        what = trace.op_names[ident] if kind == OP else f"{trace.source[ident]} {trace.nbytes[ident]:.0f} B"
        words.append(f"{('alloc', 'free', 'op', 'accumulated')[kind]} {what}")
    more = "" if stop - start <= limit else f", ... ({stop - start} events)"
    return "[" + ", ".join(words) + more + "]"

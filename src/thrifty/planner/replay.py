"""Evaluates compiled programs: the moments that can be the peak, the sequence of events, the list of operations."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from thrifty.planner.opcost import OP_FIELDS
from thrifty.planner.program import Program, Rows, features
from thrifty.planner.trace import ACCUMULATED, ALLOC, CATEGORIES, DIRECTIONS, FREE, OP

OP_TYPE = np.dtype(
    [("name", "U64"), ("phase", "U10"), ("dtype", "U16"), ("count", "f8")] + [(name, "f8") for name in OP_FIELDS]
)
# Bytes of an element, by the name of the data type, without importing torch.
ITEM_BYTES = {
    "float64": 8, "int64": 8, "float32": 4, "int32": 4, "float16": 2, "bfloat16": 2, "int16": 2, "uint8": 1, "int8": 1,
    "bool": 1, "float8_e4m3fn": 1, "float8_e5m2": 1, "complex64": 8, "complex128": 16,
}  # fmt: skip


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters of one shape: `count` in the base model and `per_layer[name]` more for every period of blocks."""

    shape: tuple[int, ...]
    dtype: str
    trainable: bool
    count: int
    per_layer: dict[str, int]

    @property
    def numel(self) -> int:
        """Elements of one of them."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of one of them."""
        return self.numel * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class ClosedForm:
    """An optimizer whose step cannot be traced.

    Attributes:
        state_bytes: Bytes of state for one parameter of (shape, dtype).
        temporary: What its step allocates beyond its state: nothing, a copy of the largest parameter, or of all.
    """

    state_bytes: Callable[[tuple[int, ...], str], int]
    temporary: Literal["none", "largest", "all"] = "none"

    def cost(self, parameters: list[tuple[ParameterGroup, int]]) -> tuple[int, int]:
        """Returns the bytes of state and of temporaries for (group, how many) of a model's parameters."""
        trainable = [(group, count) for group, count in parameters if group.trainable]
        state = sum(self.state_bytes(group.shape, group.dtype) * count for group, count in trainable)
        everything = sum(group.nbytes * count for group, count in trainable)
        largest = max((group.nbytes for group, _ in trainable), default=0)
        return state, {"none": 0, "largest": largest, "all": everything}[self.temporary]


@dataclass(frozen=True)
class Events:
    """Every change of memory in one step.

    Attributes:
        ident: (events,) which allocation.
        nbytes: (events,) signed bytes.
        category: (events,) index into `CATEGORIES`.
        phases: (events,) where in the step.
        start: Events before the step begins (what lives through it).
        late: Allocations before `start` that exist only from the end of the first step on.
    """

    ident: np.ndarray
    nbytes: np.ndarray
    category: np.ndarray
    phases: list[str]
    start: int
    late: frozenset[int] = frozenset()

    def followed_by(self, other: Events) -> Events:
        """Returns this step and then `other`, whose lasting allocations (optimizer state) live through both."""
        moved = other.ident + (int(self.ident.max()) + 1 if len(self.ident) else 0)

        def splice(left: np.ndarray, right: np.ndarray) -> np.ndarray:
            return np.concatenate([left[: self.start], right[: other.start], left[self.start :], right[other.start :]])

        return Events(
            ident=splice(self.ident, moved),
            nbytes=splice(self.nbytes, other.nbytes),
            category=splice(self.category, other.category),
            phases=self.phases[: self.start]
            + other.phases[: other.start]
            + self.phases[self.start :]
            + other.phases[other.start :],
            start=self.start + other.start,
            late=self.late | frozenset(moved[: other.start].tolist()),
        )


def expand(program: Program, sizes: np.ndarray, times: np.ndarray, *, accumulating: bool = False) -> Events:
    """Writes out every event of the full-size step.

    Args:
        program: The compiled step.
        sizes: (classes,) bytes of each class.
        times: (dims,) insertions.
        accumulating: Whether gradients exist from the start and new ones are freed as they arrive.
    """
    stretch, event, copy = program.expanded(times)
    ident, signed, category, phases = [], [], [], []
    living: list[list[int]] = [[] for _ in range(len(program.size))]
    labels: dict[tuple[int, int, int, int], str] = {}
    lasting: list[int] = []
    start = made = 0
    for number, at, repetition in zip(stretch.tolist(), event.tolist(), copy.tolist(), strict=True):
        part = program.stretches[number]
        kind, which = int(part.kind[at]), int(part.ident[at])
        if kind == ALLOC:
            name, change = made, sizes[which]
            made += 1
            living[which].append(name)
        elif kind == FREE:
            # Equal allocations are freed last in, first out, as the backward pass does.
            name, change = living[which].pop(), -sizes[which]
        elif kind == ACCUMULATED and accumulating:
            lasting.append(which)
            name, change = living[which].pop(), -sizes[which]
        else:
            continue
        key = (number, int(part.direction[at]), int(part.place[at]), repetition)
        if key not in labels:
            labels[key] = program.phase(number, at, repetition, times)
        ident.append(name)
        signed.append(change)
        category.append(int(program.category[which]))
        phases.append(labels[key])
        start += int(part.direction[at] == 0)
    events = Events(np.array(ident, np.int64), np.array(signed), np.array(category, np.int8), phases, start)
    if not lasting:
        return events
    extra = Events(
        np.arange(len(lasting)), sizes[lasting], program.category[lasting], ["start"] * len(lasting), len(lasting)
    )
    joined = events.followed_by(extra)
    return Events(joined.ident, joined.nbytes, joined.category, joined.phases, joined.start)


def closed_events(form: ClosedForm, parameters: list[tuple[ParameterGroup, int]]) -> Events:
    """The events of an optimizer that is known by its sums only."""
    state, temporary = form.cost(parameters)
    optimizer, temporaries = CATEGORIES.index("optimizer"), CATEGORIES.index("temporaries")
    return Events(
        ident=np.array([0, 1, 1]),
        nbytes=np.array([state, temporary, -temporary], np.float64),
        category=np.array([optimizer, temporaries, temporaries], np.int8),
        phases=["start", "optimizer: step", "optimizer: step"],
        start=1,
    )


class Moments:
    """The candidate moments of the peak, evaluated for many configurations.

    Args:
        program: The compiled forward and backward pass.
        rows: Its candidate rows.
        times: (dims,) insertions.
        sizes: (configurations, classes) bytes of each class.
        update: The optimizer's program with its insertions, where it was traced.
        closed: Bytes of its state and of its temporaries, where it was not.
    """

    def __init__(
        self,
        program: Program,
        rows: Rows,
        times: np.ndarray,
        sizes: np.ndarray,
        update: tuple[Program, np.ndarray] | None,
        closed: tuple[int, int] | None,
    ) -> None:
        self._program, self._times, self._sizes = program, times, sizes
        self._rows, exists = rows.at(times)
        self._refs = rows.refs
        self._end = rows.living_at_end(times)
        self._update_rows: np.ndarray | None = None
        state, levels = 0.0, np.zeros(0)
        if update is not None:
            self._update, self._update_times = update
            self._update_sizes = self._update.class_bytes(1, 1, self._update_times)
            self._update_rows, alive = self._update.rows.at(self._update_times)
            levels = np.where(alive, self._update_rows @ self._update_sizes, -np.inf)
            state = float(self._update.rows.living_at_end(self._update_times) @ self._update_sizes)
        elif closed is not None:
            state = float(closed[0])
            levels = np.array([closed[0] + closed[1]], np.float64)
        self._state_bytes = state
        body = np.where(exists, sizes @ self._rows.T.astype(np.float64), -np.inf) + state
        tail = (sizes @ self._end)[:, None] + levels[None, :]
        self.totals = np.concatenate([body, tail], axis=1)

    def explain(self, moment: int) -> tuple[int, str, dict[str, int]]:
        """Returns bytes, phase and breakdown of one moment of the first configuration."""
        parts = np.zeros(len(CATEGORIES))
        optimizer, temporaries = CATEGORIES.index("optimizer"), CATEGORIES.index("temporaries")
        if moment < len(self._rows):
            np.add.at(parts, self._program.category, self._rows[moment] * self._sizes[0])
            parts[optimizer] += self._state_bytes
            number, event, last = self._refs[moment].tolist()
            copy = int(self._times[self._program.dim[number]]) - 1 if last else 0
            phase = self._program.phase(number, event, copy, self._times)
        else:
            np.add.at(parts, self._program.category, self._end * self._sizes[0])
            phase = f"{DIRECTIONS[-1]}: step"
            row = moment - len(self._rows)
            if self._update_rows is not None:
                np.add.at(parts, self._update.category, self._update_rows[row] * self._update_sizes)
                phase = self._update.phase(0, int(self._update.rows.refs[row, 1]), 0, self._update_times)
                if self._update.rows.refs[row, 0]:
                    phase = f"{DIRECTIONS[-1]}: step"
            else:
                parts[optimizer] += self._state_bytes
                parts[temporaries] += self.totals[0, moment] - parts.sum()
        total = round(float(self.totals[0, moment]))
        return total, phase, {name: round(v) for name, v in zip(CATEGORIES, parts.tolist(), strict=True)}


def operations(program: Program, batch: int, seq: int, times: np.ndarray) -> np.ndarray:
    """Returns the operations of the step as an array of `OP_TYPE`, equal ones together, with how often each runs."""
    values = program.op_numbers @ features(batch, seq) + program.op_grown @ times
    counts: dict[tuple[object, ...], float] = {}
    for number, part in enumerate(program.stretches):
        repeat = 1 if number == 0 else int(times[program.dim[number]])
        if not repeat:
            continue
        at = np.flatnonzero(part.kind == OP)
        for which, direction in zip(part.ident[at].tolist(), part.direction[at].tolist(), strict=True):
            name, dtype = program.ops[which]
            key = (name, DIRECTIONS[direction], dtype, *np.rint(values[which]).tolist())
            counts[key] = counts.get(key, 0) + repeat
    return np.array([(*key[:3], count, *key[3:]) for key, count in counts.items()], OP_TYPE)

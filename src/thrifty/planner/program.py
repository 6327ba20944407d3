"""The compiled form of a trace: its events, with sizes as functions of batch, sequence length and numbers of blocks.

Bytes are counted by *class*: allocations of one category whose size follows one law. The memory at any moment of the
step is then an integer row times the vector of class sizes, and the peak the maximum over the few rows that no other
row dominates.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from thrifty.errors import InputError
from thrifty.planner.trace import ACCUMULATED, ALLOC, CATEGORIES, DIRECTIONS, FREE, OP, RECOMPUTE

FEATURES = ("1", "S", "B", "BS", "BSS", "SS")


def features(batch: np.ndarray | int, seq: np.ndarray | int) -> np.ndarray:
    """Returns (..., len(FEATURES)) values of the terms in which sizes are expressed."""
    b, s = np.broadcast_arrays(np.asarray(batch, np.float64), np.asarray(seq, np.float64))
    return np.stack([np.ones_like(b), s, b, b * s, b * s * s, s * s], axis=-1)


@dataclass
class Stretch:
    """A contiguous run of events: the base trace, or what one further block inserts into it.

    Attributes:
        kind: (n,) ALLOC, FREE, OP or ACCUMULATED.
        ident: (n,) class of the allocation, or index of the operation.
        direction: (n,) index into `DIRECTIONS`.
        place: (n,) index into the program's places.
    """

    kind: np.ndarray
    ident: np.ndarray
    direction: np.ndarray
    place: np.ndarray


@dataclass
class Program:
    """One traced step, extrapolated.

    Attributes:
        dims: Names of the counts of blocks.
        base: (dims,) counts of the base trace.
        units: (dims,) blocks that one insertion adds.
        size: (classes, features) bytes of each class.
        grown: (classes, dims) further bytes of each class for every insertion.
        category: (classes,) index into `CATEGORIES`.
        stretches: The base trace, then the insertions.
        position: (stretches,) where in the base trace each goes; 0 for the base itself.
        dim: (stretches,) which count repeats it; -1 for the base itself.
        start: Events of the base trace before the step begins.
        places: Names of modules.
        ops: For every operation its name and data type.
        op_numbers: (operations, numbers, features) laws of the operation's numbers.
        op_grown: (operations, numbers, dims) further numbers for every insertion.
        granularity: Bytes to whose multiples the allocator rounds.
    """

    dims: list[str]
    base: np.ndarray
    units: np.ndarray
    size: np.ndarray
    grown: np.ndarray
    category: np.ndarray
    stretches: list[Stretch]
    position: np.ndarray
    dim: np.ndarray
    start: int
    places: list[str]
    ops: list[tuple[str, str]]
    op_numbers: np.ndarray
    op_grown: np.ndarray
    granularity: int

    # -- sizes --

    def insertions(self, layers: Mapping[str, int]) -> np.ndarray:
        """Returns (dims,) how many times each insertion is made to reach `layers`.

        Raises:
            InputError: A count is missing, below the base, or not a whole number of periods above it.
        """
        out = []
        for name, base, unit in zip(self.dims, self.base.tolist(), self.units.tolist(), strict=True):
            wanted = layers.get(name)
            if wanted is None or wanted < base or (wanted - base) % unit:
                raise InputError(
                    "this number of blocks cannot be reached",
                    key=name,
                    value=wanted,
                    fix=f"{base} plus a multiple of {unit}",
                )
            out.append((wanted - base) // unit)
        return np.array(out, np.int64)

    def class_bytes(self, batch: np.ndarray | int, seq: np.ndarray | int, times: np.ndarray) -> np.ndarray:
        """Returns (..., classes) bytes of one allocation of each class, rounded as the allocator does."""
        raw = np.rint(features(batch, seq) @ self.size.T + self.grown @ times)
        return np.ceil(raw / self.granularity) * self.granularity

    # -- rows --

    def _signed(self, stretch: Stretch, *, accumulating: bool) -> np.ndarray:
        """(events, classes) change of the number of living allocations at each event."""
        out = np.zeros((len(stretch.kind), len(self.size)), np.int32)
        for kind, change in ((ALLOC, 1), (FREE, -1), (ACCUMULATED, -1 if accumulating else 0)):
            at = np.flatnonzero(stretch.kind == kind)
            out[at, stretch.ident[at]] += change
        return out

    @cached_property
    def rows(self) -> Rows:
        """Rows of the first micro-batch: gradients come into being during the backward pass."""
        return self._rows(accumulating=False)

    @cached_property
    def accumulating_rows(self) -> Rows:
        """Rows of a later micro-batch: all gradients exist, and each new one is added and freed."""
        return self._rows(accumulating=True)

    def _rows(self, *, accumulating: bool) -> Rows:
        classes, dims = len(self.size), len(self.dims)
        prefix = [np.cumsum(self._signed(s, accumulating=accumulating), axis=0) for s in self.stretches]
        totals = [p[-1] if len(p) else np.zeros(classes, np.int32) for p in prefix]
        # Gradients that exist from the start: as many as will be accumulated.
        offset = np.zeros((1 + dims, classes), np.int32)
        if accumulating:
            for stretch, dim in zip(self.stretches, self.dim.tolist(), strict=True):
                at = np.flatnonzero(stretch.kind == ACCUMULATED)
                np.add.at(offset[1 + dim], stretch.ident[at], 1)
        weights, needs, refs = [], [], []
        # Insertions at or before each event of the base trace.
        for number, stretch in enumerate(self.stretches):
            dim, position = int(self.dim[number]), int(self.position[number])
            ends = _run_ends(stretch.kind)
            if number == 0:
                ends = ends[ends >= self.start - 1]
                if self.start and (not len(ends) or ends[0] != self.start - 1):
                    ends = np.concatenate([[self.start - 1], ends])
                ends = np.unique(np.concatenate([ends, [len(stretch.kind) - 1]]))
            for event in ends.tolist():
                row = offset.copy()
                row[0] += prefix[number][event]
                where = event + 1 if number == 0 else position
                if number and position:
                    row[0] += prefix[0][position - 1]
                for other in range(1, len(self.stretches)):
                    # An insertion before event i comes after everything up to i - 1.
                    before = int(self.position[other]) < where or (
                        number > other and int(self.position[other]) == where
                    )
                    if before:
                        row[1 + int(self.dim[other])] += totals[other]
                weights.append(row)
                needs.append(dim)
                refs.append((number, event, 0))
                if number:
                    # Between its first and its last repetition an event's memory changes evenly, so the ends decide.
                    last = row.copy()
                    last[0] -= totals[number]
                    last[1 + dim] += totals[number]
                    weights.append(last)
                    needs.append(dim)
                    refs.append((number, event, 1))
        return Rows.pruned(np.array(weights), np.array(needs), np.array(refs), final=_final(refs, self.stretches))

    # -- the whole sequence --

    def expanded(self, times: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns the events of the full-size step as (stretch, event, repetition) index arrays."""
        order: list[np.ndarray] = []
        done = 0
        length = len(self.stretches[0].kind)

        def emit(number: int, start: int, stop: int, repeat: int) -> None:
            events = np.arange(start, stop)
            for copy in range(repeat):
                order.append(np.stack([np.full_like(events, number), events, np.full_like(events, copy)]))

        for number in range(1, len(self.stretches)):
            position = int(self.position[number])
            emit(0, done, position, 1)
            done = position
            emit(number, 0, len(self.stretches[number].kind), int(times[self.dim[number]]))
        emit(0, done, length, 1)
        stacked = np.concatenate(order, axis=1)
        return stacked[0], stacked[1], stacked[2]

    @cached_property
    def _pivots(self) -> dict[str, tuple[int, int]]:
        """For each list of blocks the count that repeats it and the index of the first inserted block."""
        pivots: dict[str, tuple[int, int]] = {}
        for number in range(1, len(self.stretches)):
            for place in np.unique(self.stretches[number].place).tolist():
                match = _INDEXED.match(self.places[place])
                if match:
                    dim, index = int(self.dim[number]), int(match["index"])
                    known = pivots.get(match["name"], (dim, index))
                    pivots[match["name"]] = (dim, min(index, known[1]))
        return pivots

    def phase(self, stretch: int, event: int, copy: int, times: np.ndarray) -> str:
        """Names the moment of an event in the full-size step, e.g. `backward: model.layers[31]`."""
        part = self.stretches[stretch]
        direction, place = int(part.direction[event]), self.places[int(part.place[event])]
        match = _INDEXED.match(place)
        if match and match["name"] in self._pivots:
            dim, pivot = self._pivots[match["name"]]
            index, count, unit = int(match["index"]), int(times[dim]), int(self.units[dim])
            if stretch == 0:
                index += count * unit if index >= pivot else 0
            else:
                index += unit * (
                    count - 1 - copy if direction >= RECOMPUTE and direction != len(DIRECTIONS) - 1 else copy
                )
            place = f"{match['name']}[{index}]{match['rest']}"
        return f"{DIRECTIONS[direction]}: {place}" if place else DIRECTIONS[direction]

    # -- on disk --

    def to_arrays(self) -> dict[str, np.ndarray]:
        """Returns the program as arrays, for `numpy.savez`."""
        arrays = {}
        header: dict[str, Any] = {"stretches": len(self.stretches)}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, np.ndarray):
                arrays[field.name] = value
            elif field.name != "stretches":
                header[field.name] = value
        for number, stretch in enumerate(self.stretches):
            for field in fields(stretch):
                arrays[f"{number}.{field.name}"] = getattr(stretch, field.name)
        return arrays | {"header": np.array(json.dumps(header))}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray]) -> Program:
        """The reverse of `to_arrays`."""
        header = json.loads(str(arrays["header"]))
        names = [field.name for field in fields(Stretch)]
        stretches = [Stretch(*(arrays[f"{n}.{name}"] for name in names)) for n in range(header.pop("stretches"))]
        header["ops"] = [(name, dtype) for name, dtype in header["ops"]]
        known = {field.name for field in fields(cls)} - {"stretches"}
        return cls(stretches=stretches, **header, **{key: arrays[key] for key in arrays if key in known})  # type: ignore[arg-type]

    def save(self, path: str | Path) -> None:
        """Writes the program to one `.npz` file."""
        np.savez_compressed(path, **self.to_arrays())  # type: ignore[arg-type]

    @classmethod
    def load(cls, path: str | Path) -> Program:
        """Reads what `save` wrote."""
        with np.load(path, allow_pickle=False) as archive:
            return cls.from_arrays(dict(archive))


_INDEXED = re.compile(r"(?P<name>[^\[]+)\[(?P<index>\d+)\](?P<rest>.*)")


@dataclass
class Rows:
    """Moments of the step that can be its peak.

    Attributes:
        weights: (rows, 1 + dims, classes) living allocations: of the base, and further ones for every insertion.
        needs: (rows,) the count that must be above its base for the moment to exist; -1 for none.
        refs: (rows, 3) stretch, event, and 0 or 1 for the first or the last repetition.
        end: (1 + dims, classes) what lives when the step is over.
    """

    weights: np.ndarray
    needs: np.ndarray
    refs: np.ndarray
    end: np.ndarray

    @classmethod
    def pruned(cls, weights: np.ndarray, needs: np.ndarray, refs: np.ndarray, final: int) -> Rows:
        """Drops every row below another one in each weight, since it can never be the peak."""
        flat = weights.reshape(len(weights), -1)
        # Heavy rows first: they dominate most of the others.
        order = np.argsort(-flat.sum(axis=1), kind="stable")
        kept: list[int] = []
        for at in order.tolist():
            rivals = [k for k in kept if needs[k] in (-1, needs[at])]
            if not rivals or not (flat[rivals] >= flat[at]).all(axis=1).any():
                kept.append(at)
        kept.sort()
        return cls(weights[kept], needs[kept], refs[kept], weights[final])

    def at(self, times: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the rows (rows, classes) for given insertions, and which of them exist."""
        exists = (self.needs < 0) | (times[np.maximum(self.needs, 0)] > 0) if len(times) else self.needs < 0
        return self.weights[:, 0] + np.tensordot(self.weights[:, 1:], times, axes=(1, 0)), exists

    def living_at_end(self, times: np.ndarray) -> np.ndarray:
        """Returns (classes,) what lives when the step is over."""
        return self.end[0] + np.tensordot(times, self.end[1:], axes=(0, 0))


def _run_ends(kind: np.ndarray) -> np.ndarray:
    """Indices of allocations after which the next change of memory is not an allocation: only there can a peak be."""
    changes = np.flatnonzero((kind == ALLOC) | (kind == FREE) | (kind == ACCUMULATED))
    if not len(changes):
        return changes
    following = np.append(kind[changes[1:]], FREE)
    return changes[(kind[changes] == ALLOC) & (following != ALLOC)]


def _final(refs: Sequence[tuple[int, int, int]], stretches: Sequence[Stretch]) -> int:
    return refs.index((0, len(stretches[0].kind) - 1, 0))


__all__ = ["CATEGORIES", "FEATURES", "OP", "Program", "Rows", "Stretch", "features"]

"""Cost functions of a training step: peak memory, its parts, its timeline, and the operations to time."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from thrifty.errors import InputError
from thrifty.planner.allocator import AllocatorOptions, Usage, simulate
from thrifty.planner.program import Program
from thrifty.planner.replay import (
    OP_TYPE,
    ClosedForm,
    Events,
    Moments,
    ParameterGroup,
    closed_events,
    expand,
    operations,
)
from thrifty.planner.trace import CATEGORIES

__all__ = ["OP_TYPE", "ClosedForm", "Events", "OptimizerModel", "ParameterGroup", "Peak", "StepModel", "Timeline"]


@dataclass(frozen=True)
class Peak:
    """The highest memory of a step.

    Attributes:
        bytes: Bytes allocated at the peak, rounded as the device's allocator rounds each allocation.
        phase: Where in the step, e.g. `backward: model.layers[31]`.
        breakdown: Bytes by category; they add up to `bytes`.
    """

    bytes: int
    phase: str
    breakdown: dict[str, int]


@dataclass(frozen=True)
class Timeline:
    """Memory over one step.

    Attributes:
        bytes: (categories, events) living bytes after each allocation or free.
        categories: Names of the rows.
        phases: (events,) where in the step.
    """

    bytes: np.ndarray
    categories: tuple[str, ...]
    phases: list[str]


class OptimizerModel:
    """Cost function of an optimizer step on the parameters of one structural class.

    Args:
        program: The compiled optimizer step.
        layers: The numbers of blocks of the full model.
    """

    def __init__(self, program: Program, layers: dict[str, int]) -> None:
        self.program, self.layers = program, layers

    def state_bytes(self, layers: Mapping[str, int] | None = None) -> int:
        """Returns the bytes of optimizer state for a model with `layers` blocks."""
        times = self.program.insertions(layers or self.layers)
        return int(self.program.class_bytes(1, 1, times) @ self.program.rows.living_at_end(times))

    def ops(self, layers: Mapping[str, int] | None = None) -> np.ndarray:
        """Returns the operations of one optimizer step as an array of `OP_TYPE`."""
        return operations(self.program, 1, 1, self.program.insertions(layers or self.layers))

    def to_arrays(self) -> dict[str, np.ndarray]:
        """Returns the model as arrays, for `numpy.savez`."""
        return {"model": np.array(json.dumps({"layers": self.layers})), **self.program.to_arrays()}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray]) -> OptimizerModel:
        """The reverse of `to_arrays`."""
        return cls(Program.from_arrays(arrays), **json.loads(str(arrays["model"])))

    def save(self, path: str | Path) -> None:
        """Writes the model to one `.npz` file."""
        np.savez_compressed(path, **self.to_arrays())  # type: ignore[arg-type]

    @classmethod
    def load(cls, path: str | Path) -> OptimizerModel:
        """Reads what `save` wrote."""
        with np.load(path, allow_pickle=False) as archive:
            return cls.from_arrays(dict(archive))


Optimizer = OptimizerModel | ClosedForm


class StepModel:
    """Cost function of one structural class of training steps.

    Args:
        programs: Compiled steps: `many` for batches of two and more, `one` for a batch of one; often the same object.
        layers: The numbers of blocks of the full model; every method takes others.
        parameters: The model's parameters.
        seq_range: Sequence lengths for which the graph was traced.
        fixed_seq: The only sequence length there is (images), or None.
        signature: Equal for models whose parameters an optimizer cannot tell apart.
    """

    def __init__(
        self,
        programs: dict[str, Program],
        layers: dict[str, int],
        parameters: list[ParameterGroup],
        seq_range: tuple[int, int],
        fixed_seq: int | None = None,
        signature: str = "",
    ) -> None:
        self.programs, self.layers, self.parameters = programs, layers, parameters
        self.seq_range, self.fixed_seq, self.signature = seq_range, fixed_seq, signature
        self.meta = False
        """Whether the step was traced on `meta`."""
        self.units: dict[str, int] = {}
        """The period of each count of blocks."""

    # -- memory --

    def peaks(
        self,
        batch: np.ndarray | int,
        seq: np.ndarray | int,
        layers: Mapping[str, int] | None = None,
        *,
        accumulation: np.ndarray | int = 1,
        optimizer: Optimizer | None = None,
    ) -> np.ndarray:
        """Returns the peak bytes of many configurations at once.

        Args:
            batch: Micro-batch sizes.
            seq: Sequence lengths.
            layers: Numbers of blocks; default those of the full model.
            accumulation: Micro-batches a step.
            optimizer: Cost function of the optimizer, or None for no optimizer.
        """
        shape = np.broadcast_shapes(np.shape(batch), np.shape(seq), np.shape(accumulation))
        b, s, a = (np.broadcast_to(value, shape).ravel() for value in (batch, seq, accumulation))
        out = np.zeros(len(b), np.int64)
        for one in (True, False):
            for later in (True, False):
                at = np.flatnonzero(((b == 1) == one) & ((a > 1) == later))
                if len(at):
                    moments = self._moments(b[at], s[at], layers, later, optimizer)
                    out[at] = np.rint(moments.totals.max(axis=1)).astype(np.int64)
        return out.reshape(shape)

    def peak(
        self,
        batch: int,
        seq: int,
        layers: Mapping[str, int] | None = None,
        *,
        accumulation: int = 1,
        optimizer: Optimizer | None = None,
    ) -> Peak:
        """Returns the peak of one configuration with its place and parts. Arguments as for `peaks`."""
        moments = self._moments(np.array([batch]), np.array([seq]), layers, accumulation > 1, optimizer)
        return Peak(*moments.explain(int(moments.totals[0].argmax())))

    def _moments(
        self,
        batch: np.ndarray,
        seq: np.ndarray,
        layers: Mapping[str, int] | None,
        later: bool,
        optimizer: Optimizer | None,
    ) -> Moments:
        program = self._program(batch, seq)
        layers = layers or self.layers
        times = program.insertions(layers)
        rows = program.accumulating_rows if later else program.rows
        update = closed = None
        if isinstance(optimizer, OptimizerModel):
            update = (optimizer.program, optimizer.program.insertions(layers))
        elif optimizer is not None:
            closed = optimizer.cost(self.parameter_counts(layers))
        return Moments(program, rows, times, program.class_bytes(batch, seq, times), update, closed)

    def _program(self, batch: np.ndarray | int, seq: np.ndarray | int) -> Program:
        low, high = int(np.min(seq)), int(np.max(seq))
        if low < self.seq_range[0] or high > self.seq_range[1]:
            fix = f"{self.seq_range[0]} to {self.seq_range[1]}, or compile the step for this length"
            raise InputError("the step was traced for other sequence lengths", key="seq", value=high, fix=fix)
        name = "one" if int(np.min(batch)) == 1 else "many"
        if name not in self.programs:
            raise InputError("the step was not traced for this batch size", key="batch", value=int(np.min(batch)))
        return self.programs[name]

    # -- the whole step --

    def events(
        self,
        batch: int,
        seq: int,
        layers: Mapping[str, int] | None = None,
        *,
        accumulation: int = 1,
        optimizer: Optimizer | None = None,
    ) -> Events:
        """Returns every allocation and free of one whole step, for the timeline and the allocator simulator."""
        layers = layers or self.layers
        program = self._program(batch, seq)
        times = program.insertions(layers)
        step = expand(program, program.class_bytes(batch, seq, times), times, accumulating=accumulation > 1)
        if isinstance(optimizer, OptimizerModel):
            extra = optimizer.program
            more = extra.insertions(layers)
            return step.followed_by(expand(extra, extra.class_bytes(1, 1, more), more))
        if optimizer is not None:
            return step.followed_by(closed_events(optimizer, self.parameter_counts(layers)))
        return step

    def timeline(
        self,
        batch: int,
        seq: int,
        layers: Mapping[str, int] | None = None,
        *,
        accumulation: int = 1,
        optimizer: Optimizer | None = None,
    ) -> Timeline:
        """Returns memory by category after every allocation and free of one step."""
        events = self.events(batch, seq, layers, accumulation=accumulation, optimizer=optimizer)
        changes = np.zeros((len(CATEGORIES), len(events.nbytes)))
        changes[events.category, np.arange(len(events.nbytes))] = events.nbytes
        begin = max(events.start - 1, 0)
        return Timeline(np.cumsum(changes, axis=1)[:, begin:], CATEGORIES, events.phases[begin:])

    def reserved(
        self,
        batch: int,
        seq: int,
        layers: Mapping[str, int] | None = None,
        *,
        accumulation: int = 1,
        optimizer: Optimizer | None = None,
        options: AllocatorOptions | None = None,
        steps: int = 2,
    ) -> Usage:
        """Simulates the CUDA caching allocator over whole steps; returns its peaks of allocated and reserved bytes."""
        events = self.events(batch, seq, layers, accumulation=accumulation, optimizer=optimizer)
        return simulate(events.ident, events.nbytes, start=events.start, late=events.late, steps=steps, options=options)

    def ops(self, batch: int, seq: int, layers: Mapping[str, int] | None = None) -> np.ndarray:
        """Returns the operations of one micro-batch as an array of `OP_TYPE`, equal ones together."""
        program = self._program(batch, seq)
        return operations(program, batch, seq, program.insertions(layers or self.layers))

    # -- parameters --

    def parameter_counts(self, layers: Mapping[str, int] | None = None) -> list[tuple[ParameterGroup, int]]:
        """Returns each group of equal parameters with how many of it the model has."""
        program = next(iter(self.programs.values()))
        times = dict(zip(program.dims, program.insertions(layers or self.layers).tolist(), strict=True))
        return [(g, g.count + sum(n * times[dim] for dim, n in g.per_layer.items())) for g in self.parameters]

    def parameter_count(self, layers: Mapping[str, int] | None = None, *, trainable: bool | None = None) -> int:
        """Returns the number of elements of all parameters, or of those that are (not) trainable."""
        counts = self.parameter_counts(layers)
        return sum(g.numel * n for g, n in counts if trainable is None or g.trainable == trainable)

    # -- on disk --

    def stored_as(self) -> dict[str, str]:
        """For each program the first name of it: what two names share is kept once."""
        first = {id(program): name for name, program in reversed(self.programs.items())}
        return {name: first[id(program)] for name, program in self.programs.items()}

    def to_arrays(self) -> dict[str, np.ndarray]:
        """Returns the model as arrays, for `numpy.savez`."""
        header = {
            "programs": self.stored_as(),
            "layers": self.layers,
            "parameters": [asdict(group) for group in self.parameters],
            "seq_range": self.seq_range,
            "fixed_seq": self.fixed_seq,
            "signature": self.signature,
        }
        kept = set(self.stored_as().values())
        arrays = {f"{name}/{key}": a for name in kept for key, a in self.programs[name].to_arrays().items()}
        return {"model": np.array(json.dumps(header)), **arrays}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray]) -> StepModel:
        """The reverse of `to_arrays`."""
        header = json.loads(str(arrays["model"]))
        kept, programs = {}, {}
        for name, stored in header["programs"].items():
            if stored in kept:
                programs[name] = kept[stored]
                continue
            prefix = stored + "/"
            own = {key.removeprefix(prefix): a for key, a in arrays.items() if key.startswith(prefix)}
            programs[name] = kept[stored] = Program.from_arrays(own)
        groups = [ParameterGroup(**{**g, "shape": tuple(g["shape"])}) for g in header["parameters"]]
        others = header["fixed_seq"], header["signature"]
        return cls(programs, header["layers"], groups, tuple(header["seq_range"]), *others)

    def save(self, path: str | Path) -> None:
        """Writes the model to one `.npz` file."""
        np.savez_compressed(path, **self.to_arrays())  # type: ignore[arg-type]

    @classmethod
    def load(cls, path: str | Path) -> StepModel:
        """Reads what `save` wrote."""
        with np.load(path, allow_pickle=False) as archive:
            return cls.from_arrays(dict(archive))

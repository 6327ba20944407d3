"""A structural class, compiled: what its configurations need and run, as functions of micro-batch and accumulation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from thrifty.planner.opcost import OP_FIELDS
from thrifty.planner.program import features
from thrifty.planner.replay import OP_TYPE, ClosedForm, operations
from thrifty.planner.trace import CATEGORIES, DIRECTIONS, OP

if TYPE_CHECKING:
    from thrifty.method import Phase
    from thrifty.planner.memory import OptimizerModel, StepModel
    from thrifty.planner.program import Program, Rows


def _blocks(bits: int, states: int, block: int, least: int = 4096) -> Callable[[tuple[int, ...], str], int]:
    """State of `states` moments of `bits` bits with one float32 scale for each block; small tensors stay in float32."""

    def state_bytes(shape: tuple[int, ...], dtype: str) -> int:
        elements = int(np.prod(shape))
        if elements < least:
            return elements * 4 * states
        return states * (elements * bits // 8 + -(-elements // block) * 4)

    return state_bytes


def _plain(nbytes: int) -> Callable[[tuple[int, ...], str], int]:
    return lambda shape, dtype: int(np.prod(shape)) * nbytes


# Optimizers of `TrainingArguments.optim` whose steps read values and so cannot be traced. bitsandbytes: blocks of 256;
# torchao: blocks of 256 in 8 bits and 128 in 4 bits.
CLOSED_FORMS = {
    **dict.fromkeys(("adamw_bnb_8bit", "adamw_8bit", "paged_adamw_8bit"), ClosedForm(_blocks(8, 2, 256))),
    **dict.fromkeys(("lion_8bit", "paged_lion_8bit", "rmsprop_bnb_8bit"), ClosedForm(_blocks(8, 1, 256))),
    **dict.fromkeys(("ademamix_8bit", "paged_ademamix_8bit"), ClosedForm(_blocks(8, 3, 256))),
    **dict.fromkeys(("lion_32bit", "paged_lion_32bit", "rmsprop_bnb", "rmsprop_bnb_32bit"), ClosedForm(_plain(4))),
    **dict.fromkeys(("paged_adamw_32bit",), ClosedForm(_plain(8))),
    **dict.fromkeys(("ademamix", "paged_ademamix_32bit"), ClosedForm(_plain(12))),
    "adamw_torch_8bit": ClosedForm(_blocks(8, 2, 256), "largest"),
    "adamw_torch_4bit": ClosedForm(_blocks(4, 2, 128), "largest"),
}


def measured_form(build: Callable[[list[Any]], Any]) -> ClosedForm:
    """The closed form of an optimizer that cannot be traced, from its real state on small tensors.

    A state follows a law in rows and columns: constants, factored moments, full moments. Four shapes determine it.

    Args:
        build: Makes the optimizer of a list of parameters.
    """
    matrices = [(256, 320), (320, 448), (512, 384), (640, 512), (384, 768)]
    flat = [(65536,), (98304,), (131072,)]
    square = np.array([[1, m, n, m * n] for m, n in matrices], np.float64)
    line = np.array([[1, n] for (n,) in flat], np.float64)
    of_matrix = np.linalg.lstsq(square, [_real_state(build, shape) for shape in matrices], rcond=None)[0]
    of_vector = np.linalg.lstsq(line, [_real_state(build, shape) for shape in flat], rcond=None)[0]

    def state_bytes(shape: tuple[int, ...], dtype: str) -> int:
        if len(shape) < 2:
            return round(float(of_vector @ [1, int(np.prod(shape))]))
        rows, columns = shape[-2], shape[-1]
        return round(float(of_matrix @ [1, rows, columns, rows * columns]) * int(np.prod(shape[:-2])))

    return ClosedForm(state_bytes, "largest")


def _real_state(build: Callable[[list[Any]], Any], shape: tuple[int, ...]) -> float:
    """Bytes of state of one parameter after two real steps."""
    import torch

    parameter = torch.nn.Parameter(torch.zeros(shape))
    optimizer = build([parameter])
    for _ in range(2):
        parameter.grad = torch.full(shape, 1e-3)
        optimizer.step()
    values = optimizer.state[parameter].values()
    return float(sum(v.untyped_storage().nbytes() for v in values if isinstance(v, torch.Tensor)))


@dataclass
class Compiled:
    """Cost functions of a structural class on one kind of device."""

    step: StepModel
    optimizer: OptimizerModel | ClosedForm
    precision: str
    """Of matrix products: fp32, tf32, bf16, fp16."""
    fused: bool
    """Whether torch.compile is on."""
    key: str = ""
    """Of the structural class."""
    held: int = 0
    """Bytes that the methods keep themselves, outside the step."""
    accumulation: int | None = None
    """Micro-batches a step where a method says how many."""
    phases: tuple[Phase, ...] = ()
    """Stretches of the run in which a step is cheaper."""
    updates_inside: bool = False
    """Whether the update happens inside the pass, which then holds what it takes."""
    _law_cache: dict[int, list[int]] = field(default_factory=dict, repr=False)
    _count_cache: dict[int, Any] = field(default_factory=dict, repr=False)

    def moments(self, batch: np.ndarray, seq: int, *, later: bool) -> np.ndarray:
        """Bytes at each moment that can be the peak, of the pass and of the update: (batches, moments, categories).

        Args:
            batch: (batches,) micro-batch sizes, all one or all above one: PyTorch takes other paths for one.
            seq: Sequence length.
            later: Whether gradients of earlier micro-batches exist (accumulation).
        """
        return self.with_update(*self.pass_moments(batch, seq, later=later))

    def pass_moments(self, batch: np.ndarray, seq: int, *, later: bool) -> tuple[np.ndarray, np.ndarray]:
        """The moments of the pass without the optimizer's state, and its end (batches, 1, categories)."""
        program, rows = self._rows(int(batch[0]), later)
        times = program.insertions(self.step.layers)
        weights, exists = rows.at(times)
        sizes = program.class_bytes(batch, seq, times)
        body = _by_category(weights[exists], sizes, program.category)
        return body, _by_category(rows.living_at_end(times)[None], sizes, program.category)

    def with_update(self, body: np.ndarray, end: np.ndarray) -> np.ndarray:
        """The moments of the pass and of the update after it."""
        state, update = self._update
        states = np.zeros(len(CATEGORIES))
        states[_OPTIMIZER] = state
        return np.concatenate([body + states, end + update[None]], axis=1)

    def phase(self, moment: int, batch: int, *, later: bool) -> str:
        """Where in the step one of the moments is."""
        program, rows = self._rows(batch, later)
        times = program.insertions(self.step.layers)
        references = rows.refs[rows.at(times)[1]]
        if moment >= len(references):
            return "optimizer: step"
        number, event, last = references[moment].tolist()
        return program.phase(number, event, int(times[program.dim[number]]) - 1 if last else 0, times)

    @cached_property
    def adding_ops(self) -> np.ndarray:
        """Operations that add the gradients of a later micro-batch to those that are there: (shapes,) of `OP_TYPE`."""
        rows = [
            ("aten.add_", "backward", group.dtype, count, 0.0, 2.0 * group.nbytes, group.nbytes, 0.0, 0.0, 0.0, 0.0)
            for group, count in self.step.parameter_counts()
            if group.trainable
        ]
        return np.array(rows, OP_TYPE)

    def _program(self, batch: int) -> Program:
        programs = self.step.programs
        return programs["one" if batch == 1 and "one" in programs else "many"]

    def _rows(self, batch: int, later: bool) -> tuple[Program, Rows]:
        program = self._program(batch)
        return program, program.accumulating_rows if later else program.rows

    @cached_property
    def _update(self) -> tuple[float, np.ndarray]:
        """Bytes of optimizer state, and (moments, categories) of the update."""
        if isinstance(self.optimizer, ClosedForm):
            state, temporary = self.optimizer.cost(self.step.parameter_counts())
            moment = np.zeros((1, len(CATEGORIES)))
            moment[0, _OPTIMIZER], moment[0, _TEMPORARIES] = state, temporary
            if self.updates_inside:
                moment[0, _TEMPORARIES] = 0.0
            return float(state), moment
        program = self.optimizer.program
        times = program.insertions(self.optimizer.layers)
        sizes = program.class_bytes(1, 1, times)
        weights, exists = program.rows.at(times)
        moments = _by_category(weights[exists], sizes[None], program.category)[0]
        end = program.rows.living_at_end(times)
        if self.updates_inside:
            moments = _by_category(end[None], sizes[None], program.category)[0]
        return float(end @ sizes), moments

    def ops(self, batch: np.ndarray, seq: int, depth: float = 1.0) -> np.ndarray:
        """Operations of one micro-batch: (batches, operations) of `OP_TYPE`. Batches as for `moments`.

        Args:
            batch: (batches,) micro-batch sizes.
            seq: Sequence length.
            depth: Share of the blocks that run.
        """
        program = self._program(int(batch[0]))
        times = program.insertions(self.step.layers)
        if depth != 1.0:
            # A mean over a run needs no whole number of blocks, and may lie below the traced ones.
            wanted = np.array([self.step.layers[name] for name in program.dims]) * depth
            times = (wanted - program.base) / program.units
        laws, directions, repeats = self._counts(program)
        numbers = (
            features(batch, seq) @ np.swapaxes(program.op_numbers[laws], 1, 2)
            + (program.op_grown[laws] @ times)[:, None]
        )
        row = np.zeros((1, len(laws)), OP_TYPE)
        row["name"], row["dtype"] = (np.array([program.ops[law][i] for law in laws]) for i in (0, 1))
        row["phase"], row["count"] = np.array(DIRECTIONS)[directions], repeats[:, 0] + repeats[:, 1:] @ times
        out = np.repeat(row, len(batch), axis=0)
        for index, name in enumerate(OP_FIELDS):
            out[name] = numbers[..., index].T
        return out[:, out["count"][0] != 0]

    def _counts(self, program: Program) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Distinct operations: law, direction, and (operations, 1 + dims) how often each runs, and more a block."""
        known = self._count_cache.get(id(program))
        if known is None:
            law_of = np.array(self._laws(program), np.int64)
            keys, columns = [], []
            for number, part in enumerate(program.stretches):
                at = np.flatnonzero(part.kind == OP)
                keys.append(law_of[part.ident[at]] * len(DIRECTIONS) + part.direction[at])
                columns.append(np.full(len(at), 0 if number == 0 else 1 + int(program.dim[number])))
            distinct, place = np.unique(np.concatenate(keys), return_inverse=True)
            repeats = np.zeros((len(distinct), 1 + len(program.dims)))
            np.add.at(repeats, (place.ravel(), np.concatenate(columns)), 1)
            known = distinct // len(DIRECTIONS), distinct % len(DIRECTIONS), repeats
            self._count_cache[id(program)] = known
        return known

    def _laws(self, program: Program) -> list[int]:
        """For each operation the first one that is the same in all shapes."""
        known = self._law_cache.get(id(program))
        if known is None:
            first: dict[Any, int] = {}
            flat = [table.reshape(len(program.ops), -1) for table in (program.op_numbers, program.op_grown)]
            rows = np.concatenate(flat, axis=1)
            known = [first.setdefault((*program.ops[i], row.tobytes()), i) for i, row in enumerate(rows)]
            self._law_cache[id(program)] = known
        return known

    @cached_property
    def update_ops(self) -> np.ndarray | None:
        """Operations of the update; None for an optimizer in closed form."""
        if isinstance(self.optimizer, ClosedForm):
            return None
        program = self.optimizer.program
        return operations(program, 1, 1, program.insertions(self.optimizer.layers))

    @cached_property
    def bytes(self) -> dict[str, int]:
        """Parameters, gradients and optimizer state, and what fully sharded training gathers: a block and the largest
        single parameter."""
        counts = self.step.parameter_counts()
        per_block = sum(g.nbytes * max(g.per_layer.values(), default=0) for g, _ in counts)
        largest = max((g.nbytes for g, _ in counts), default=0)
        return {
            "parameters": sum(g.nbytes * n for g, n in counts),
            "gradients": sum(g.nbytes * n for g, n in counts if g.trainable),
            "optimizer": int(self._update[0]),
            "gathered": per_block + largest,
        }


_OPTIMIZER, _TEMPORARIES = CATEGORIES.index("optimizer"), CATEGORIES.index("temporaries")


def _by_category(rows: np.ndarray, sizes: np.ndarray, category: np.ndarray) -> np.ndarray:
    """Bytes by category: counts (rows, classes) times sizes (batches, classes) give (batches, rows, categories)."""
    out = np.zeros((len(sizes), len(rows), len(CATEGORIES)))
    for index in np.unique(category).tolist():
        at = np.flatnonzero(category == index)
        out[..., index] = sizes[:, at] @ rows[:, at].T
    return out

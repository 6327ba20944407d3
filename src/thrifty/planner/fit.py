"""From traces of a small model to a cost function of the full one.

A step is traced with two blocks for a few batch shapes, and once with one block more. Every size is then a law in batch
and sequence length (almost always a single product such as 4096 * B * S), and every further block a repetition.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any, TypeVar

import numpy as np

from thrifty.planner.events import Growth, TraceMismatch, growth
from thrifty.planner.laws import fit_laws
from thrifty.planner.memory import OptimizerModel, ParameterGroup, StepModel
from thrifty.planner.opcost import OP_FIELDS
from thrifty.planner.program import FEATURES, Program, Stretch
from thrifty.planner.step import Step
from thrifty.planner.store import content_hash
from thrifty.planner.trace import OP, Trace
from thrifty.planner.tracer import StepTracer

Point = tuple[int, int]
Result = TypeVar("Result")
_SINGLE_NUMBER = 16
_SCRATCH = " scratch"
_READ, _WRITTEN = OP_FIELDS.index("read"), OP_FIELDS.index("written")
_ROUNDING = {"cuda": 512, "cpu": 1}


class Tracers:
    """The small models of one structural class, each built when first asked for, to share among compilations.

    Args:
        step: The class; its optimizer and clipping do not matter.
    """

    def __init__(self, step: Step) -> None:
        self.step = step
        self.base = step.base_counts()
        # A count whose period is all its blocks is traced in full, and nothing is extrapolated in it.
        self.growing = [name for name in self.base if step.units.get(name, 1) < step.layers[name]]
        self._built: dict[tuple[str, bool], StepTracer] = {}

    def get(self, dim: str = "", *, meta: bool = False) -> StepTracer:
        """Returns the tracer of the base model, or of one with a further period of the blocks `dim`."""
        if (dim, meta) not in self._built:
            counts = {
                name: count + (self.step.units.get(name, 1) if name == dim else 0) for name, count in self.base.items()
            }
            self._built[dim, meta] = StepTracer(self.step, counts, meta=meta)
        return self._built[dim, meta]


def compile_step(
    step: Step,
    *,
    seq: int = 1024,
    batches: Sequence[str] = ("many", "one"),
    tracers: Tracers | None = None,
    meta: bool | None = None,
) -> StepModel:
    """Traces one structural class of steps and returns its cost function.

    Args:
        step: What to run.
        seq: A sequence length of the range that matters: graphs change at `step.seq_breaks`.
        batches: `many` for batches of two and more, `one` for a batch of one (PyTorch takes other paths there).
        tracers: Models of the same class, where they exist already.
        meta: Whether traces on `meta` are known to be those of fake tensors; None to compare them first.

    Raises:
        TraceMismatch: The step's graph depends on the shape or the depth in a way that cannot be extrapolated.
    """
    tracers = tracers or Tracers(step)
    low, high = _regime(step, seq)
    programs: dict[str, Program] = {}
    single: dict[Point, Trace] = {}
    for name in batches:
        points = _points(step, low, high, many=name == "many")
        begin = points[:2]
        first = single.get(begin[0]) or tracers.get(meta=bool(meta)).forward_backward(*begin[0])
        if meta is None:
            # The first batch shape is traced both ways; where they agree, the rest takes the fast one.
            quick = _on_meta(tracers, begin[0], first)
            meta, first = quick is not None, quick or first
        small = tracers.get(meta=meta)
        traces = [first, *(small.forward_backward(*point) for point in begin[1:])]
        larger = {dim: tracers.get(dim, meta=meta).forward_backward(*begin[0]) for dim in tracers.growing}
        spare = _spare_points(points)
        if name == "many" and "one" in batches:
            # Where a batch of one runs the same events, and their sizes follow the same laws, it needs no program.
            alone = _points(step, low, high, many=False)[0]
            single[alone] = small.forward_backward(*alone)
            if _same_events(first, single[alone]):
                fitted = _fit([*begin, alone], [*traces, single[alone]])
                if fitted.exact:
                    programs[name] = programs["one"] = build_program(step, tracers.base, fitted, first, larger)
                    break
        fitted = _fit_with_spares(begin, traces, spare, small.forward_backward)
        programs[name] = build_program(step, tracers.base, fitted, first, larger)
    for program in programs.values():
        # Found here, so that processes working in parallel share this work too.
        _ = program.rows, program.accumulating_rows
    built = {dim: tracers.get(dim, meta=bool(meta)) for dim in ("", *tracers.growing)}
    groups = parameter_groups(built[""], {dim: built[dim] for dim in tracers.growing})
    signature = content_hash([[tracer.signature() for tracer in built.values()], dict(step.layers)])
    model = StepModel(programs, dict(step.layers), groups, (low, high), step.fixed_seq, signature)
    model.meta, model.units = bool(meta), {name: step.units.get(name, 1) for name in step.layers}
    return model


def compile_optimizer(step: Step, *, tracers: Tracers | None = None) -> OptimizerModel:
    """Traces the step's optimizer (its second step, when its state exists) and returns its cost function.

    Args:
        step: Whose `build_optimizer` and `clip_grad_norm` to trace.
        tracers: Models of the same class, where they exist already.
    """
    tracers = tracers or Tracers(step)
    trace = tracers.get().optimizer_step(step)
    larger = {dim: tracers.get(dim).optimizer_step(step) for dim in tracers.growing}
    program = build_program(step, tracers.base, _fit([(1, 1)], [trace]), trace, larger)
    return OptimizerModel(program, dict(step.layers))


def compile_many(jobs: Sequence[Callable[[], Result]], processes: int = 2) -> list[Result]:
    """Runs several compilations in parallel processes and returns their results in order.

    Args:
        jobs: Functions without arguments; they are inherited by forked processes, so closures are fine.
        processes: How many to run at a time; 1 stays in this process.
    """
    if processes <= 1 or len(jobs) <= 1:
        return [job() for job in jobs]
    _JOBS[:] = jobs
    try:
        with ProcessPoolExecutor(processes, mp_context=get_context("fork"), initializer=_one_thread) as pool:
            return list(pool.map(_run_job, range(len(jobs))))
    finally:
        _JOBS.clear()


_JOBS: list[Callable[[], Any]] = []


def _run_job(index: int) -> Any:
    return _JOBS[index]()


def _one_thread() -> None:
    import torch

    torch.set_num_threads(1)


def _on_meta(tracers: Tracers, point: Point, wanted: Trace) -> Trace | None:
    """Returns the trace on `meta` tensors if memory does there what it did on fake tensors, else None."""
    try:
        found = tracers.get(meta=True).forward_backward(*point)
    except (RuntimeError, TypeError, ValueError):
        # What cannot run on `meta` (it lacks a kernel, or asks for a value) is traced on fake tensors.
        return None
    return found if np.array_equal(_outline(found), _outline(wanted)) else None


def _outline(trace: Trace) -> np.ndarray:
    """(events, 3) kind, bytes and category of all changes of memory except those of single numbers."""
    changes = trace.kind != OP
    ident = trace.ident[changes]
    rows = np.stack([trace.kind[changes], trace.nbytes[ident], trace.category[ident]], axis=1)
    return rows[trace.nbytes[ident] > _SINGLE_NUMBER]


def _sum_laws(points: Sequence[Point], parts: Sequence[np.ndarray], owner: np.ndarray, count: int) -> tuple[Any, bool]:
    """(operations, features) laws of bytes moved: each tensor has a simple one, their sum has not.

    Args:
        points: (batch, seq) of each trace.
        parts: For each trace the bytes of each tensor.
        owner: To which operation a tensor belongs.
        count: Operations.
    """
    laws = fit_laws(points, np.stack(parts, axis=1))
    out = np.zeros((count, len(FEATURES)))
    np.add.at(out, owner, laws.coefficients)
    return out, bool(laws.exact.all())


@dataclass(frozen=True)
class Fitted:
    """The laws of one graph.

    Attributes:
        sizes: (allocations, features) of the bytes of each allocation.
        numbers: (operations, len(OP_FIELDS), features) of the numbers of each operation.
        exact: Whether every law holds at every point.
    """

    sizes: np.ndarray
    numbers: np.ndarray
    exact: bool


def _fit(points: Sequence[Point], traces: Sequence[Trace]) -> Fitted:
    """Fits traces that differ in shape only.

    Raises:
        TraceMismatch: They differ by more.
    """
    first = traces[0]
    for trace, point in zip(traces, points, strict=True):
        if not np.array_equal(trace.kind, first.kind) or not np.array_equal(trace.ident, first.ident):
            raise TraceMismatch(f"the operations for batch and sequence {point} are not those for {points[0]}")
    sizes = fit_laws(points, np.stack([trace.nbytes for trace in traces], axis=1))
    operations = len(first.op_names)
    read, plain_reads = _sum_laws(points, [trace.op_reads for trace in traces], first.op_of_read, operations)
    written, plain_writes = _sum_laws(points, [trace.op_writes for trace in traces], first.op_of_write, operations)
    kept = [index for index in range(len(OP_FIELDS)) if index not in (_READ, _WRITTEN)]
    numbers = fit_laws(
        points, np.stack([trace.op_numbers for trace in traces], axis=2)[:, kept].reshape(-1, len(points))
    )
    laws = np.empty((operations, len(OP_FIELDS), len(FEATURES)))
    laws[:, kept] = numbers.coefficients.reshape(operations, len(kept), len(FEATURES))
    laws[:, _READ], laws[:, _WRITTEN] = read, written
    # What kernels take inside themselves is measured and follows no exact law.
    measured = np.array([source.endswith(_SCRATCH) for source in first.source], bool)
    exact = bool((sizes.exact | measured).all() and numbers.exact.all() and plain_reads and plain_writes)
    return Fitted(sizes.coefficients, laws, exact)


def _fit_with_spares(
    points: Sequence[Point], traces: Sequence[Trace], spare: Sequence[Point], more: Callable[[int, int], Trace]
) -> Fitted:
    """Fits traces, and traces a spare point after the other until all laws are determined."""
    points, traces, spare = list(points), list(traces), list(spare)
    fitted = _fit(points, traces)
    while not fitted.exact and spare:
        points.append(spare.pop(0))
        traces.append(more(*points[-1]))
        fitted = _fit(points, traces)
    return fitted


def _same_events(left: Trace, right: Trace) -> bool:
    """Whether two traces are of one graph: equal in all but sizes, none of which was measured in a kernel."""
    arrays = ("kind", "ident", "direction", "category", "op_of_read", "op_of_write")
    if not all(np.array_equal(getattr(left, name), getattr(right, name)) for name in arrays):
        return False
    lists = ("op_names", "op_dtypes", "source")
    if any(getattr(left, name) != getattr(right, name) for name in lists):
        return False
    return not any(source.endswith(_SCRATCH) for source in left.source)


def build_program(
    step: Step, base: Mapping[str, int], fitted: Fitted, first: Trace, larger: Mapping[str, Trace]
) -> Program:
    """Makes the program of one graph.

    Args:
        step: The traced step.
        base: Its counts of blocks.
        fitted: The laws of its sizes.
        first: A trace of it.
        larger: For each count a trace with one block more, at the point of `first`.
    """
    growths = {dim: growth(first, larger[dim], dim) if dim in larger else Growth() for dim in base}
    dims = list(base)
    grown = _grown(len(first.nbytes), dims, growths)
    keys = np.concatenate([fitted.sizes, grown, first.category[:, None]], axis=1)
    unique, class_of = np.unique(keys, axis=0, return_inverse=True)
    class_of = class_of.ravel()
    places = list(first.places)
    stretches = [_stretch(first, np.arange(len(first.kind)), first.ident, class_of, places)]
    order = sorted(
        ((chunk.position, dims.index(dim), chunk, larger[dim]) for dim, g in growths.items() for chunk in g.chunks),
        key=lambda item: item[:2],
    )
    for _, _, chunk, trace in order:
        stretches.append(_stretch(trace, chunk.events, chunk.like, class_of, places))
    operations, fields_ = len(first.op_names), len(OP_FIELDS)
    op_grown = np.zeros((operations, fields_, len(dims)))
    for index, dim in enumerate(dims):
        for op, further in growths[dim].grown_ops.items():
            op_grown[op, :, index] = further
    return Program(
        dims=dims,
        base=np.array([base[dim] for dim in dims], np.int64),
        units=np.array([step.units.get(dim, 1) for dim in dims], np.int64),
        size=unique[:, : len(FEATURES)],
        grown=unique[:, len(FEATURES) : -1],
        category=unique[:, -1].astype(np.int8),
        stretches=stretches,
        position=np.array([0, *(item[0] for item in order)], np.int64),
        dim=np.array([-1, *(item[1] for item in order)], np.int64),
        start=first.start,
        places=places,
        ops=list(zip(first.op_names, first.op_dtypes, strict=True)),
        op_numbers=fitted.numbers,
        op_grown=op_grown,
        granularity=_ROUNDING[step.dialect],
    )


def parameter_groups(small: StepTracer, larger: Mapping[str, StepTracer]) -> list[ParameterGroup]:
    """Counts equal parameters, and how many of each a further block brings."""
    base = Counter(small.parameters)
    further = {dim: Counter(tracer.parameters) - base for dim, tracer in larger.items()}
    return [
        ParameterGroup(
            shape, dtype, trainable, count, {dim: more[shape, dtype, trainable] for dim, more in further.items()}
        )
        for (shape, dtype, trainable), count in base.items()
    ]


def _points(step: Step, low: int, high: int, *, many: bool) -> list[Point]:
    """Batch shapes to trace: as few as tell all products of B, S and S squared apart.

    They hold prime factors that no width has, lest two laws agree at a point by chance, and multiples of 128 where
    there is room, so that no kernel pads.
    """
    if step.fixed_seq:
        return [(3, step.fixed_seq), (5, step.fixed_seq)] if many else [(1, step.fixed_seq)]
    # CPU kernels are run for real to measure their scratch, so shapes are small there.
    grains, primes = (
        ((128, 64, 32, 16, 8, 4, 2, 1), (11, 13, 17)) if step.dialect == "cuda" else ((8, 4, 2, 1), (29, 31, 37))
    )
    limit = min(high, step.seq_limit or high)
    lengths = list(primes)
    for grain in grains:
        lengths = [grain * (prime + (-(-low // grain) if low > 1 else 0)) for prime in primes]
        if lengths[1] <= limit:
            break
    # The third is only for sizes that two points leave open.
    lengths[2] = lengths[2] if lengths[2] <= limit else (lengths[0] + lengths[1]) // 2
    return list(zip((3, 5, 7), lengths, strict=True)) if many else [(1, lengths[2]), (1, lengths[0])]


def _spare_points(points: list[Point]) -> list[Point]:
    """Further shapes, between and below the others, for sizes that the first do not determine."""
    (b0, s0), (b1, s1) = points[0], points[-1]
    if len(points) == 1 or s0 == s1:
        return []
    middle = (s0 + s1) // 2
    if b0 == 1:
        return [(1, middle)]
    return [(b1, s1), (b1, s0), (b0, s1), (b1 + 4, middle)]


def _regime(step: Step, seq: int) -> tuple[int, int]:
    """The range of sequence lengths around `seq` in which the graph stays the same."""
    if step.fixed_seq:
        return step.fixed_seq, step.fixed_seq
    below = [limit for limit in step.seq_breaks if limit <= seq]
    above = [limit for limit in step.seq_breaks if limit > seq]
    return max(below, default=1), min(above, default=1 << 40) - 1


def _grown(allocations: int, dims: list[str], growths: Mapping[str, Growth]) -> np.ndarray:
    out = np.zeros((allocations, len(dims)))
    for index, dim in enumerate(dims):
        for ident, further in growths[dim].grown.items():
            out[ident, index] = further
    return out


def _stretch(trace: Trace, events: np.ndarray, like: np.ndarray, class_of: np.ndarray, places: list[str]) -> Stretch:
    """Cuts events out of a trace, with allocations named by class and places by the program's list."""
    kind = trace.kind[events]
    ident = np.array(like, np.int64)
    ident[kind != OP] = class_of[ident[kind != OP]]
    numbers = []
    for name in trace.places:
        if name not in places:
            places.append(name)
        numbers.append(places.index(name))
    return Stretch(kind, ident, trace.direction[events], np.array(numbers, np.int64)[trace.place[events]])

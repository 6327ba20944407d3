"""A chain of blocks, schedules that recompute parts of it, and what a schedule costs.

Stage i turns x_i into x_{i+1} and, when it runs for its backward pass, keeps further tensors (`saved`). A schedule is a
list of operations; `simulate` is the definition of what each takes, for planners, executors and tests alike.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

Kind = Literal["run", "save", "hold", "drop", "back", "out", "in"]


class Op(NamedTuple):
    """One operation of a schedule.

    Kinds: `run` a stage and keep nothing of it; `save`: run it and keep all that its backward pass needs, its input
    included; `hold`: keep the input of a stage that was just computed; `drop`: forget a held input; `back`: the
    stage's backward pass; `out`, `in`: send what a stage saved to the host, bring it back.
    """

    kind: Kind
    stage: int


Schedule = list[Op]


@dataclass(frozen=True, kw_only=True)
class Chain:
    """Costs of L stages. Times in any one unit, sizes in bytes.

    Args:
        forward: (L,) time of a stage's forward pass.
        backward: (L,) time of its backward pass.
        inputs: (L + 1,) bytes of x_0 ... x_L.
        saved: (L,) bytes that a stage keeps for its backward pass beside its input.
        gradients: (L + 1,) bytes of the gradients of x_0 ... x_L; empty leaves them out of the account.
        sources: Stages whose input is not the output of the stage before (a decoder's first block): it is always kept.
        bandwidth: Bytes to or from the host in a unit of time; 0 is no link.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    inputs: tuple[int, ...]
    saved: tuple[int, ...]
    gradients: tuple[int, ...] = ()
    sources: frozenset[int] = field(default_factory=frozenset)
    bandwidth: float = 0.0

    def __post_init__(self) -> None:
        sizes = {len(self.forward), len(self.backward), len(self.saved), len(self.inputs) - 1}
        if len(sizes) != 1 or (self.gradients and len(self.gradients) != len(self.inputs)):
            raise ValueError("a chain of L stages has L times and saved sizes, and L + 1 inputs and gradients")

    def __len__(self) -> int:
        return len(self.forward)

    def gradient(self, stage: int) -> int:
        """Bytes of the gradient of x_stage."""
        return self.gradients[stage] if self.gradients else 0


@dataclass(frozen=True)
class Cost:
    """What a schedule takes: time, the highest memory in bytes, and how often each stage ran forward."""

    time: float
    peak: int
    runs: tuple[int, ...]


def simulate(chain: Chain, schedule: Iterable[Op]) -> Cost:
    """The cost of a schedule.

    Counted are held and saved tensors, the input and output of a stage while it runs, and gradients. The last stage of
    a recomputation stops after what its backward pass needs, so its output does not exist.

    Raises:
        ValueError: The schedule uses something that is not there, or is not a whole forward and backward pass.
    """
    length = len(chain)
    ops = list(schedule)
    held, saved, away = {0}, set[int](), set[int]()
    current: int | None = 0
    pending = length  # the gradient of x_pending exists once the backward pass has begun
    first = True
    time, peak = 0.0, chain.inputs[0]
    runs = [0] * length

    def resident() -> int:
        kept = held | saved | ({current} if current is not None else set())
        gradient = 0 if first else chain.gradient(pending)
        return sum(chain.inputs[i] for i in kept) + sum(chain.saved[i] for i in saved) + gradient

    for at, (kind, i) in enumerate(ops):
        there = i in held or i in saved or current == i
        if kind in ("run", "save"):
            if i in chain.sources and runs[i] == 0:
                held.add(i)
            elif not there:
                raise ValueError(f"operation {at}: the input of stage {i} is not in memory")
            produces = first or kind == "run" or at + 1 == len(ops) or ops[at + 1] != Op("back", i)
            current = i
            if kind == "save":
                saved.add(i)
            peak = max(peak, resident() + (chain.inputs[i + 1] if produces else 0))
            current = i + 1 if produces else None
            time += chain.forward[i]
            runs[i] += 1
        elif kind == "hold":
            if not there:
                raise ValueError(f"operation {at}: the input of stage {i} is not there to be held")
            held.add(i)
        elif kind == "drop":
            held.discard(i)
        elif kind == "back":
            if i not in saved or pending != i + 1:
                raise ValueError(f"operation {at}: stage {i} cannot run backward now")
            first, current = False, None
            peak = max(peak, resident() + chain.gradient(i))
            saved.discard(i)
            held.discard(i)
            pending = i
            time += chain.backward[i]
        elif kind == "out":
            if i not in saved:
                raise ValueError(f"operation {at}: stage {i} has saved nothing that could be sent to the host")
            saved.discard(i)
            away.add(i)
        elif kind == "in":
            if i not in away:
                raise ValueError(f"operation {at}: what stage {i} saved is not on the host")
            away.discard(i)
            saved.add(i)
            peak = max(peak, resident())
    if pending != 0 or min(runs, default=1) < 1:
        raise ValueError("the schedule does not run all stages forward and backward")
    return Cost(time, peak, tuple(runs))


def forward_length(schedule: Schedule) -> int:
    """How many of the operations belong to the first forward pass."""
    last = max(op.stage for op in schedule)
    return next(at for at, op in enumerate(schedule) if op.stage == last and op.kind in ("run", "save")) + 1


def keep_all(length: int) -> Schedule:
    """Nothing is recomputed."""
    return [*(Op("save", i) for i in range(length)), *(Op("back", i) for i in reversed(range(length)))]


def segmented(length: int, starts: Sequence[int]) -> Schedule:
    """Segments that begin at `starts` keep their input only, and are recomputed as one.

    >>> [op.stage for op in segmented(4, [0, 2]) if op.kind == "hold"]
    [2]
    """
    bounds = sorted({0, *starts})
    ops: Schedule = []
    for i in range(length):
        if i in bounds and i:
            ops.append(Op("hold", i))
        ops.append(Op("run", i))
    for begin, end in reversed(list(zip(bounds, [*bounds[1:], length], strict=True))):
        ops += [Op("save", i) for i in range(begin, end)]
        ops += [Op("back", i) for i in reversed(range(begin, end))]
    return ops


def periodic(length: int, size: int) -> Schedule:
    """Equal segments of `size` stages."""
    return segmented(length, range(0, length, size))


def root_size(length: int) -> int:
    """Blocks in a segment so that there are about as many segments as blocks in one.

    >>> [root_size(n) for n in (1, 4, 12, 24, 32)]
    [1, 2, 3, 5, 6]
    """
    return max(1, round(math.sqrt(length)))

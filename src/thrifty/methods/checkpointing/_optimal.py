"""The optimal schedule for a heterogeneous chain under a memory limit: the dynamic programme of Beaumont et al. (2019).

Optimal among the schedules that keep what they hold until its backward pass (the paper's persistent ones).
"""

from __future__ import annotations

import math
from functools import cached_property

import numpy as np

from thrifty.errors import InputError
from thrifty.methods.checkpointing._chain import Chain, Op, Schedule, keep_all, periodic, simulate

SLOTS = 500
_SAVE = -1
_NONE = -2


class ChainProgram:
    """The programme's table for one chain, for all memory limits at once.

    Args:
        chain: The stages.
        slots: Sizes are rounded up to a `slots`-th of the memory that keeping everything takes, unless they have a
            common divisor that is fine enough.
    """

    def __init__(self, chain: Chain, slots: int = SLOTS) -> None:
        self.chain = chain
        self.full = simulate(chain, keep_all(len(chain))).peak
        sizes = [*chain.inputs, *chain.saved, *chain.gradients]
        divisor = math.gcd(*sizes) or 1
        self.unit = divisor if self.full // divisor <= 4 * slots else -(-self.full // slots)
        # What stays whatever the schedule: the input of the chain and of each source.
        self.constant = sum(chain.inputs[i] for i in {0, *chain.sources})
        # An output beside the source that follows it is counted twice.
        self._limit = -(-(self.full + max(chain.inputs)) // self.unit)

    def _units(self, size: int) -> int:
        return -(-size // self.unit)

    @cached_property
    def _table(self) -> tuple[dict[tuple[int, int], np.ndarray], dict[tuple[int, int], np.ndarray]]:
        chain, length, limit = self.chain, len(self.chain), self._limit
        inputs = [self._units(size) for size in chain.inputs]
        held = [0 if i in chain.sources else size for i, size in enumerate(inputs)]
        saved = [self._units(size) for size in chain.saved]
        gradient = [self._units(chain.gradient(i)) for i in range(length + 1)]
        elapsed = np.concatenate([[0.0], np.cumsum(chain.forward)])
        cost: dict[tuple[int, int], np.ndarray] = {}
        choice: dict[tuple[int, int], np.ndarray] = {}

        def shifted(table: np.ndarray, by: int) -> np.ndarray:
            """What a sub-chain costs when `by` units are taken."""
            out = np.full(limit + 1, np.inf)
            if by <= limit:
                out[by:] = table[: limit + 1 - by]
            return out

        def above(table: np.ndarray, least: int) -> np.ndarray:
            table[:least] = np.inf
            return table

        for width in range(length):
            for s in range(length - width):
                t = s + width
                after = gradient[t + 1] if t + 1 < length else 0
                # Save everything at s; the rest of the chain goes on from its output.
                back = saved[s] + gradient[s + 1] + gradient[s]
                own = chain.forward[s] + chain.backward[s]
                if width == 0:
                    output = inputs[s + 1] if s + 1 == length else 0
                    best = above(np.full(limit + 1, float(own)), max(saved[s] + output + after, back))
                else:
                    rest = shifted(cost[s + 1, t], saved[s] + held[s + 1])
                    best = above(own + rest, max(saved[s] + inputs[s + 1] + after, back))
                picked = np.where(np.isfinite(best), _SAVE, _NONE).astype(np.int16)
                # Keep nothing from s up to k, hold x_k, and come back to the left part at the end.
                passing = 0
                for k in range(s + 1, t + 1):
                    passing = max(passing, (inputs[k - 1] if k - 1 > s else 0) + inputs[k] + after)
                    split = elapsed[k] - elapsed[s] + shifted(cost[k, t], held[k]) + cost[s, k - 1]
                    split = above(split, passing)
                    better = split < best if k not in chain.sources else split <= best
                    better &= np.isfinite(split)
                    best = np.where(better, split, best)
                    picked = np.where(better, k, picked).astype(np.int16)
                cost[s, t], choice[s, t] = best, picked
        return cost, choice

    @cached_property
    def minimum(self) -> int:
        """The least memory in bytes for which there is a schedule."""
        cost = self._table[0][0, len(self.chain) - 1]
        return int(np.flatnonzero(np.isfinite(cost))[0]) * self.unit + self.constant

    def time(self, memory: int) -> float:
        """Time of the optimal schedule in `memory` bytes; infinite where there is none."""
        at = (memory - self.constant) // self.unit
        return math.inf if at < 0 else float(self._table[0][0, len(self.chain) - 1][min(at, self._limit)])

    def schedule(self, memory: int) -> Schedule:
        """The optimal schedule within `memory` bytes.

        Raises:
            InputError: There is none.
        """
        if math.isinf(self.time(memory)):
            raise InputError(
                "no schedule of recomputation needs as little memory",
                key="budget",
                value=memory,
                fix=f"allow at least {self.minimum} bytes ({self.minimum / self.full:.2f} of what keeping all takes)",
            )
        ops: Schedule = []
        self._emit(0, len(self.chain) - 1, min((memory - self.constant) // self.unit, self._limit), ops)
        return ops

    def _emit(self, s: int, t: int, units: int, ops: Schedule) -> None:
        chain = self.chain
        k = int(self._table[1][s, t][units])
        if k == _SAVE:
            ops.append(Op("save", s))
            if s < t:
                taken = self._units(chain.saved[s]) + self._held(s + 1)
                if self._table[1][s + 1, t][units - taken] != _SAVE:
                    ops.append(Op("hold", s + 1))
                self._emit(s + 1, t, units - taken, ops)
            ops.append(Op("back", s))
            return
        ops += [Op("run", i) for i in range(s, k)]
        ops.append(Op("hold", k))
        self._emit(k, t, units - self._held(k), ops)
        self._emit(s, k - 1, units, ops)

    def _held(self, stage: int) -> int:
        return 0 if stage in self.chain.sources else self._units(self.chain.inputs[stage])


def optimal(chain: Chain, memory: int, *, slots: int = SLOTS) -> Schedule:
    """The fastest schedule within `memory` bytes.

    Where sizes had to be rounded up, a periodic schedule may fit better than the programme knows, so those are tried
    too.

    Raises:
        InputError: No schedule needs as little memory.
    """
    length = len(chain)
    candidates = [keep_all(length), *(periodic(length, size) for size in range(1, length + 1))]
    program = ChainProgram(chain, slots)
    if math.isfinite(program.time(memory)):
        candidates.insert(0, program.schedule(memory))
    costs = [simulate(chain, ops) for ops in candidates]
    fitting = [(cost.time, at) for at, cost in enumerate(costs) if cost.peak <= memory]
    return candidates[min(fitting)[1]] if fitting else program.schedule(memory)

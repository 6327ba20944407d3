"""Checkmate: which values of a graph to keep and which to compute again, as an integer programme (HiGHS).

R[t, i]: value i is computed in stage t. S[t, i]: it is kept from stage t - 1 into stage t. U[t, k]: memory after the
k-th value of stage t. F[t, i, k]: value i is freed after the k-th value of stage t. With paging, after POET: H[t, i]:
it is on the host at the beginning of stage t; O[t, i]: it is sent there in stage t; I[t, i]: it comes back at the
beginning of stage t.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from thrifty.errors import InputError
from thrifty.methods.checkpointing._chain import Chain, Op, Schedule


@dataclass(frozen=True)
class Node:
    """A value: what it costs, its bytes, and what it is computed from.

    Args:
        cost: Time to compute it.
        size: Bytes.
        needs: Groups of nodes; of each group one is enough (a block's output comes with and without what it saves).
        beside: It can only be kept where one of these is kept too (what a block saves has its input among it).
    """

    cost: float
    size: float
    needs: tuple[tuple[int, ...], ...] = ()
    beside: tuple[int, ...] = ()


@dataclass(frozen=True)
class Solution:
    """(stages, nodes) booleans: what is computed, what is kept into a stage, what is sent to the host and what comes
    back; and the cost of it all."""

    computed: np.ndarray
    kept: np.ndarray
    time: float
    sent: np.ndarray | None = None
    fetched: np.ndarray | None = None


def checkmate(
    nodes: Sequence[Node],
    memory: float,
    *,
    goals: Sequence[int] | None = None,
    page: Sequence[float] | None = None,
    seconds: float = 60.0,
) -> Solution:
    """The fastest schedule within a memory limit.

    Args:
        nodes: In topological order.
        memory: Limit of the sizes that exist at a time.
        goals: The node that each stage must reach; default one stage for each node. Fewer stages are faster to solve.
        page: What it costs to send each value to the host, and again to bring it back; None is without a host.
        seconds: Time limit of the solver.

    Raises:
        InputError: There is no schedule, or none was found in time.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import coo_array

    goals = list(range(len(nodes))) if goals is None else list(goals)
    n, stages = len(nodes), len(goals)
    scale = max(max(node.size for node in nodes), 1.0)
    sizes = np.array([node.size / scale for node in nodes])
    users = [[k for k, node in enumerate(nodes) if any(i in group for group in node.needs)] for i in range(n)]
    releases = [(i, k) for i in range(n) for k in sorted({i, *users[i]})]
    at = {pair: index for index, pair in enumerate(releases)}
    size_r, size_f = stages * n, stages * len(releases)

    def r(t: int, i: int) -> int:
        return t * n + i

    def s(t: int, i: int) -> int:
        return size_r + t * n + i

    def u(t: int, k: int) -> int:
        return 2 * size_r + t * n + k

    def f(t: int, i: int, k: int) -> int:
        return 3 * size_r + t * len(releases) + at[i, k]

    def h(t: int, i: int) -> int:
        return 3 * size_r + size_f + t * n + i

    def o(t: int, i: int) -> int:
        return 4 * size_r + size_f + t * n + i

    def back(t: int, i: int) -> int:
        return 5 * size_r + size_f + t * n + i

    paging = page is not None
    count = (6 if paging else 3) * size_r + size_f
    rows: list[tuple[dict[int, float], float, float]] = []
    low, high = np.zeros(count), np.ones(count)
    high[2 * size_r : 3 * size_r] = memory / scale
    integral = np.ones(count)
    integral[2 * size_r : 3 * size_r] = 0
    for t, goal in enumerate(goals):
        low[r(t, goal)] = 1
        for i in range(n):
            if i > goal:
                high[r(t, i)] = 0  # a stage ends with its goal
            if t == 0:
                high[s(t, i)] = 0
            else:  # kept only if it was kept or computed before
                came = {back(t - 1, i): -1.0} if paging else {}
                rows.append(({s(t, i): 1, s(t - 1, i): -1, r(t - 1, i): -1, **came}, -np.inf, 0))
                if nodes[i].beside:
                    rows.append(({s(t, i): 1, **{s(t, j): -1.0 for j in nodes[i].beside}}, -np.inf, 0))
            if paging:
                if t == 0:
                    high[h(t, i)] = 0
                else:
                    rows.append(({h(t, i): 1, h(t - 1, i): -1, o(t - 1, i): -1}, -np.inf, 0))
                rows.append(({o(t, i): 1, s(t, i): -1, r(t, i): -1}, -np.inf, 0))
                rows.append(({back(t, i): 1, h(t, i): -1}, -np.inf, 0))
            for group in nodes[i].needs:
                have = {r(t, i): 1.0}
                for j in group:
                    have[r(t, j)], have[s(t, j)] = -1.0, -1.0
                    if paging:
                        have[back(t, j)] = -1.0
                rows.append((have, -np.inf, 0))
        for k in range(n):
            # U[t, k] = what was there + the new value - what was freed after the value before.
            row = {u(t, k): 1.0, r(t, k): -sizes[k]}
            if k == 0:
                for i in range(n):
                    row[s(t, i)] = row.get(s(t, i), 0.0) - sizes[i]
                    if paging:
                        row[back(t, i)] = -sizes[i]
            else:
                row[u(t, k - 1)] = -1.0
                for i in {k - 1, *(j for group in nodes[k - 1].needs for j in group)}:
                    row[f(t, i, k - 1)] = sizes[i]
            rows.append((row, 0, 0))
        for i, k in releases:
            # Freed after k: k was computed, i is not kept further, and nobody later in the stage needs it.
            later = [j for j in users[i] if j > k]
            keep = [s(t + 1, i)] if t + 1 < stages else []
            hindrances = [*(r(t, j) for j in later), *keep]
            rows.append(({f(t, i, k): 1, r(t, k): -1}, -np.inf, 0))
            rows += [({f(t, i, k): 1.0, h: 1.0}, -np.inf, 1.0) for h in hindrances]
            # It can only be freed if it is there.
            present = {back(t, i): -1.0} if paging else {}
            rows.append(({f(t, i, k): 1, r(t, i): -1, s(t, i): -1, **present}, -np.inf, 0))
        for i in range(n):  # and only once
            rows.append(({f(t, i, k): 1 for j, k in releases if j == i}, -np.inf, 1))
    objective = np.zeros(count)
    for t in range(stages):
        for i, node in enumerate(nodes):
            objective[r(t, i)] = node.cost
            if page is not None:
                objective[o(t, i)] = objective[back(t, i)] = page[i]
    entries = [(row, column, value) for row, (terms, _, _) in enumerate(rows) for column, value in terms.items()]
    where = np.array([(row, column) for row, column, _ in entries])
    matrix = coo_array(([value for *_, value in entries], (where[:, 0], where[:, 1])), shape=(len(rows), count))
    least: Any = [a for _, a, _ in rows]
    most: Any = [b for _, _, b in rows]
    limits = LinearConstraint(matrix.tocsr(), least, most)
    bounds: Any = (low, high)
    found = milp(
        objective, constraints=limits, bounds=Bounds(*bounds), integrality=integral, options={"time_limit": seconds}
    )
    if found.x is None:
        raise InputError(
            f"no schedule of recomputation was found ({found.message})",
            key="budget",
            value=memory,
            fix="allow more memory, or use the policy optimal",
        )
    values = np.round(found.x).astype(bool)
    computed = values[:size_r].reshape(stages, n)
    kept = values[size_r : 2 * size_r].reshape(stages, n)
    if not paging:
        return Solution(computed, kept, float(objective @ values))
    sent, fetched = (values[k * size_r + size_f : (k + 1) * size_r + size_f].reshape(stages, n) for k in (4, 5))
    return Solution(computed, kept, float(objective @ values), sent, fetched)


# How a stage can be run: for its output, for what its backward pass needs, for both.
_PLAIN, _BARE, _WHOLE = 0, 1, 2


def _at(stage: int, way: int) -> int:
    return 1 + 3 * stage + way


def chain_nodes(chain: Chain) -> tuple[list[Node], list[int]]:
    """A chain as a graph: its input, for each stage the three ways to run it, and the backward passes.

    Returns:
        The nodes and the goals: one stage of the programme for each stage's backward pass.
    """
    length = len(chain)
    nodes = [Node(0.0, 0.0)]  # the input of the chain, which always stays

    def before(i: int) -> tuple[tuple[int, ...], ...]:
        if i == 0 or i in chain.sources:
            return ()
        return ((_at(i - 1, _PLAIN), _at(i - 1, _WHOLE)),)

    for i, (time, output, saved) in enumerate(zip(chain.forward, chain.inputs[1:], chain.saved, strict=True)):
        if i + 1 in chain.sources:
            output = 0
        beside = before(i)[0] if before(i) else ()
        nodes += [
            Node(time, output, before(i)),
            Node(time, saved, before(i), beside),
            Node(time, output + saved, before(i), beside),
        ]
    goals = []
    for i in reversed(range(length)):
        goals.append(len(nodes))
        # The loss needs the output of the last stage.
        run = (_at(i, _WHOLE), _at(i, _BARE)) if i + 1 < length else (_at(i, _WHOLE),)
        after = ((len(nodes) - 1,),) if i + 1 < length else ()
        nodes.append(Node(chain.backward[i], chain.gradient(i), (run, *before(i), *after)))
    return nodes, goals


def chain_schedule(chain: Chain, memory: int, *, seconds: float = 60.0) -> Schedule:
    """Checkmate's schedule for a chain, in `memory` bytes of which the inputs that always stay are a part.

    Raises:
        InputError: There is no schedule, or none was found in time.
    """
    length = len(chain)
    nodes, goals = chain_nodes(chain)
    constant = sum(chain.inputs[i] for i in {0, *chain.sources})
    solution = checkmate(nodes, memory - constant, goals=goals, seconds=seconds)
    ops: Schedule = []
    held: set[int] = set()

    def wanted(i: int, t: int) -> bool:
        """Whether the input of stage i is kept into stage t of the programme."""
        return t < len(goals) and bool(solution.kept[t, [_at(i - 1, _PLAIN), _at(i - 1, _WHOLE)]].any())

    for t in range(len(goals)):
        backward = length - 1 - t
        for i in range(backward + 1):
            ways = solution.computed[t, _at(i, 0) : _at(i, 3)]
            if not ways.any():
                continue
            # The whole costs no more time than the output alone, so it may be computed and not be kept.
            stays = i == backward or solution.kept[t + 1, [_at(i, _BARE), _at(i, _WHOLE)]].any()
            ops.append(Op("save" if stays and (ways[_BARE] or ways[_WHOLE]) else "run", i))
            if i in held and i < backward and not wanted(i, t + 1):
                ops.append(Op("drop", i))
                held.discard(i)
            if i < backward and i + 1 not in held and wanted(i + 1, t + 1):
                ops.append(Op("hold", i + 1))
                held.add(i + 1)
        ops.append(Op("back", backward))
        held.discard(backward)
        gone = {i for i in held if not wanted(i, t + 1)}
        ops += [Op("drop", i) for i in sorted(gone)]
        held -= gone
    return ops

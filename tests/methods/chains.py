"""Chains for the tests of recomputation: random ones, real ones, and exhaustive search over all schedules."""

from __future__ import annotations

import heapq
import math
import random

import torch
from torch import nn

from thrifty.methods.checkpointing._chain import Chain


def random_chain(rng: random.Random, length: int, *, bandwidth: float = 0.0) -> Chain:
    """Small whole numbers, so that nothing is rounded. The last output is not counted."""
    return Chain(
        forward=tuple(rng.randint(1, 9) for _ in range(length)),
        backward=tuple(rng.randint(1, 9) for _ in range(length)),
        inputs=(*(rng.randint(1, 5) for _ in range(length)), 0),
        saved=tuple(rng.randint(1, 9) for _ in range(length)),
        bandwidth=bandwidth,
    )


State = tuple[frozenset[int], frozenset[int], int, int]


def exhaustive(chain: Chain, memory: int) -> float:
    """The least time of all schedules within `memory`, by shortest paths through all states.

    A state is (held inputs, stages whose tensors are saved, the input just computed or -1, the pending gradient). Held
    inputs stay until their stage's backward pass.
    """
    length = len(chain)
    start: State = (frozenset([0]), frozenset(), 0, length)
    queue: list[tuple[float, int, State]] = [(0.0, 0, start)]
    done: set[State] = set()
    pushed = 0

    def resident(held: frozenset[int], saved: frozenset[int], current: int) -> int:
        kept = held | saved | ({current} if current >= 0 else set())
        return sum(chain.inputs[i] for i in kept) + sum(chain.saved[i] for i in saved)

    while queue:
        time, _, state = heapq.heappop(queue)
        if state in done:
            continue
        done.add(state)
        held, saved, current, pending = state
        if pending == 0:
            return time
        moves: list[tuple[float, State]] = []
        if 0 <= current < length and current not in held:
            moves.append((0.0, (held | {current}, saved, current, pending)))
        for i in range(pending):
            if i not in held and i not in saved and current != i:
                continue
            more = saved | {i}
            if resident(held, saved, i) + chain.inputs[i + 1] <= memory:
                moves.append((chain.forward[i], (held, saved, i + 1, pending)))
            if i not in saved and resident(held, more, i) + chain.inputs[i + 1] <= memory:
                moves.append((chain.forward[i], (held, more, i + 1, pending)))
            if i not in saved and i + 1 == pending < length and resident(held, more, i) <= memory:
                moves.append((chain.forward[i], (held, more, -1, pending)))
        last = pending - 1
        if last in saved and (pending < length or current == length) and resident(held, saved, -1) <= memory:
            moves.append((chain.backward[last], (held - {last}, saved - {last}, -1, last)))
        for duration, following in moves:
            if following not in done:
                pushed += 1
                heapq.heappush(queue, (time + duration, pushed, following))
    return math.inf


class Block(nn.Module):
    """A residual-free block that keeps its input, the inner activation and what GELU needs."""

    def __init__(self, width: int, inner: int, out: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.up, self.down, self.dropout = nn.Linear(width, inner), nn.Linear(inner, out), dropout
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        hidden = nn.functional.gelu(self.up(x))
        return self.down(nn.functional.dropout(hidden, self.dropout, self.training))


def unequal(dropout: float = 0.0) -> nn.Sequential:
    """Eight blocks of unequal widths: a hybrid, in small."""
    torch.manual_seed(4)
    widths = [8, 24, 8, 8, 40, 8, 16, 8, 8]
    inner = [64, 8, 8, 160, 8, 64, 8, 96]
    return nn.Sequential(*(Block(a, i, b, dropout) for a, i, b in zip(widths, inner, widths[1:], strict=False)))

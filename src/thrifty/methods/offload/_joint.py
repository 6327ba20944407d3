"""Which blocks of a chain keep their activations, send them to the host, or compute them again: the joint optimum.

The model: one link, at `bandwidth`, with one block's activations on it at a time; transfers overlap with computing.
Sending a block's begins when it has run, and must be over when the next block's begins. Fetching begins with the
backward pass of the block that was fetched before (the first: of the whole), and must be over when it is needed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from thrifty.errors import InputError
from thrifty.methods.checkpointing._chain import Chain, Op, Schedule

Choice = Literal["keep", "offload", "recompute"]
CHOICES: tuple[Choice, ...] = ("keep", "offload", "recompute")


@dataclass(frozen=True)
class Plan:
    """A choice for each block, the time of a pass, and its highest memory in bytes."""

    choices: tuple[Choice, ...]
    time: float
    peak: int


def transfer(chain: Chain, stage: int) -> float:
    """Time to move what a stage saves, its input included."""
    nbytes = chain.inputs[stage] + chain.saved[stage]
    return nbytes / chain.bandwidth if chain.bandwidth else math.inf


def assess(chain: Chain, choices: tuple[Choice, ...]) -> Plan:
    """Time and peak of a plan, by going through it."""
    length = len(chain)
    time, peak, kept = 0.0, 0, 0
    flying, since = -1, 0.0  # the block on the link, and how long ago its sending began
    for i, choice in enumerate(choices):
        own = chain.inputs[i] + chain.saved[i]
        busy = flying >= 0 and since < transfer(chain, flying)
        on_link = chain.inputs[flying] + chain.saved[flying] if busy else 0
        # A block that is to be recomputed keeps nothing while it runs, but its input and output.
        running = chain.inputs[i] if choice == "recompute" else own
        peak = max(peak, kept + on_link + running + chain.inputs[i + 1])
        time += chain.forward[i]
        since += chain.forward[i]
        kept += {"keep": own, "offload": 0, "recompute": chain.inputs[i]}[choice]
        if choice == "offload":
            if flying >= 0:
                time += max(0.0, transfer(chain, flying) - since)
            flying, since = i, 0.0
    if flying >= 0:
        time += max(0.0, transfer(chain, flying) - since)
    since = 0.0
    for i in reversed(range(length)):
        own = chain.inputs[i] + chain.saved[i]
        if choices[i] == "offload":
            time += max(0.0, transfer(chain, i) - since)
            since = 0.0
        below = next((j for j in reversed(range(i)) if choices[j] == "offload"), None)
        coming = chain.inputs[below] + chain.saved[below] if below is not None else 0
        resident = kept + (chain.saved[i] if choices[i] == "recompute" else own if choices[i] == "offload" else 0)
        peak = max(peak, resident + coming + chain.gradient(i + 1) + chain.gradient(i))
        work = chain.backward[i] + (chain.forward[i] if choices[i] == "recompute" else 0.0)
        time, since = time + work, since + work
        kept -= {"keep": own, "offload": 0, "recompute": chain.inputs[i]}[choices[i]]
    return Plan(choices, time, peak)


@dataclass(frozen=True)
class _Label:
    """A partial plan. Better: less time, less kept, more work to hide the next fetch behind."""

    time: float
    kept: int
    work: float
    choices: tuple[Choice, ...]


def joint(chain: Chain, memory: int, allowed: tuple[Choice, ...] = CHOICES) -> Plan:
    """The fastest plan within `memory` bytes: a programme over blocks whose states are the undominated partial plans.

    Args:
        chain: The blocks; `bandwidth` in bytes a unit of its times.
        memory: The limit.
        allowed: The choices there are.

    Raises:
        InputError: No plan fits.
    """
    states: dict[int, list[_Label]] = {-1: [_Label(0.0, 0, 0.0, ())]}
    for i in range(len(chain)):
        following: dict[int, list[_Label]] = {}
        for last, labels in states.items():
            elapsed = sum(chain.forward[last + 1 : i]) if last >= 0 else 0.0
            flown = chain.inputs[last] + chain.saved[last] if last >= 0 else 0
            on_link = flown if last >= 0 and elapsed < transfer(chain, last) else 0
            for label in labels:
                for choice in allowed:
                    new = _extend(chain, i, label, choice, last, elapsed, on_link, flown, memory)
                    if new is not None:
                        following.setdefault(i if choice == "offload" else last, []).append(new)
        states = {last: _undominated(labels) for last, labels in following.items()}
    best: _Label | None = None
    for last, labels in states.items():
        tail = 0.0
        if last >= 0:
            # The last sending, and then the first fetch behind the blocks above.
            tail = max(0.0, transfer(chain, last) - sum(chain.forward[last + 1 :]))
        for label in labels:
            stall = max(0.0, transfer(chain, last) - label.work) if last >= 0 else 0.0
            total = label.time + tail + stall
            if best is None or total < best.time:
                best = _Label(total, label.kept, 0.0, label.choices)
    if best is None:
        raise InputError(
            "no division into keeping, offloading and recomputing needs as little memory",
            key="budget",
            value=memory,
            fix="allow more memory, or use gradient-checkpointing with the policy optimal",
        )
    return assess(chain, best.choices)


def _extend(
    chain: Chain,
    i: int,
    label: _Label,
    choice: Choice,
    last: int,
    elapsed: float,
    on_link: int,
    flown: int,
    memory: int,
) -> _Label | None:
    """The label with a choice for block i, or None where it does not fit.

    Args:
        chain: The blocks.
        i: The block.
        label: The plan below it.
        choice: What to do with it.
        last: The block offloaded before, or -1.
        elapsed: Time since that one has run.
        on_link: Its bytes, if it is still being sent when block i runs forward.
        flown: Its bytes, which come back while block i runs backward.
        memory: The limit.
    """
    own = chain.inputs[i] + chain.saved[i]
    recomputed = choice == "recompute"
    running = chain.inputs[i] if recomputed else own
    adds = {"keep": own, "offload": 0, "recompute": chain.inputs[i]}[choice]
    in_backward = label.kept + (chain.inputs[i] if recomputed else 0) + (chain.saved[i] if recomputed else own) + flown
    if label.kept + on_link + running + chain.inputs[i + 1] > memory:
        return None
    if in_backward + chain.gradient(i + 1) + chain.gradient(i) > memory:
        return None
    work = chain.backward[i] + (chain.forward[i] if recomputed else 0.0)
    time = label.time + chain.forward[i] + work
    if choice != "offload":
        return _Label(time, label.kept + adds, label.work + work, (*label.choices, choice))
    if last >= 0:
        # Sending waits for the block sent before; in the backward pass that one is fetched behind this one's work.
        time += max(0.0, transfer(chain, last) - elapsed - chain.forward[i])
        time += max(0.0, transfer(chain, last) - label.work - work)
    return _Label(time, label.kept, 0.0, (*label.choices, choice))


def _undominated(labels: list[_Label]) -> list[_Label]:
    kept: list[_Label] = []
    for label in sorted(labels, key=lambda x: (x.time, x.kept, -x.work)):
        if not any(other.kept <= label.kept and other.work >= label.work for other in kept):
            kept.append(label)
    return kept


def as_schedule(choices: tuple[Choice, ...]) -> Schedule:
    """The plan as operations: each recomputed block is recomputed from its own input."""
    ops: Schedule = []
    for i, choice in enumerate(choices):
        if choice == "recompute":
            ops += [Op("hold", i), Op("run", i)] if i else [Op("run", i)]
        else:
            ops.append(Op("save", i))
        if choice == "offload":
            ops.append(Op("out", i))
    for i in reversed(range(len(choices))):
        if choices[i] == "recompute":
            ops.append(Op("save", i))
        elif choices[i] == "offload":
            ops.append(Op("in", i))
        ops.append(Op("back", i))
    return ops

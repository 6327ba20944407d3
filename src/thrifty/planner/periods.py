"""What repeats: blocks of a model that are treated alike, and stretches of a run that cost alike."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

    from thrifty.method import Phase
    from thrifty.planner.step import Step


def block_signature(block: nn.Module) -> tuple[Any, ...]:
    """Equal for blocks that run the same."""
    shapes = tuple((n, tuple(p.shape), p.requires_grad) for n, p in block.named_parameters())
    kinds = tuple(type(m).__name__ for m in block.modules())
    return kinds, shapes, getattr(block, "gradient_checkpointing", None), getattr(block, "checkpoint_position", None)


def period(values: Sequence[Any]) -> int:
    """After how many values a list repeats (a last incomplete period is allowed); its length if it never does."""
    for unit in range(1, len(values)):
        if all(values[i] == values[i - unit] for i in range(unit, len(values))):
            return unit
    return max(1, len(values))


def common_units(step: Step, known: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """The periods in which several things that are done to blocks repeat together.

    Args:
        step: Whose counts of blocks.
        known: Of each thing the facts of its dry run, with its `units`.
    """
    periods = {name: math.lcm(*(fact["units"][name] for fact in known)) for name in step.layers}
    return {name: min(unit, step.layers[name]) for name, unit in periods.items()}


def crossed(first: Sequence[Phase], second: Sequence[Phase]) -> list[Phase]:
    """Two divisions of the same run as one: shares are multiplied."""
    from thrifty.method import Phase

    if not first or not second:
        return list(first or second)
    ends = [list(itertools.accumulate(p.steps for p in phases)) for phases in (first, second)]
    bounds = sorted({0, *ends[0], *ends[1]})
    merged = []
    for start, stop in itertools.pairwise(bounds):
        a, b = (
            phases[min(bisect.bisect_right(end, start), len(phases) - 1)]
            for phases, end in zip((first, second), ends, strict=True)
        )
        shares = {key: getattr(a, key) * getattr(b, key) for key in ("depth", "length", "batch")}
        merged.append(Phase(steps=stop - start, description=f"{a.description}, {b.description}", **shares))
    return merged

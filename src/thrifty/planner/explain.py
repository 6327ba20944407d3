"""Why a plan is what it is, in sentences."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from thrifty.errors import InputError
from thrifty.planner.compiled import Compiled
from thrifty.planner.search import SHARDINGS, Evaluator, single_additions
from thrifty.planner.structure import Structure

if TYPE_CHECKING:
    from thrifty.planner.plan import Estimate, Search

_LEAST_WEIGHTS = 8
_REMEDY_SECONDS = 30.0
_CATEGORY_WORDS = {
    "parameters": "the weights", "gradients": "the gradients", "optimizer": "the optimizer's state",
    "activations": "activations kept for the backward pass", "temporaries": "temporaries",
    "other": "buffers and workspaces",
}  # fmt: skip


def explain(search: Search, row: int | None, chosen: Estimate | None, allow: Sequence[str]) -> list[str]:
    """Sentences on the chosen configuration, or on why nothing fits and what would."""
    if row is None or chosen is None:
        return infeasible(search, allow)
    lines = [_headline(chosen), _peak(chosen)]
    lines += _bought(search, row)
    lines += _next_best(search, row)
    if chosen.host_bytes:
        lines.append(f"The host must have {_size(chosen.host_bytes)} of free memory for what is offloaded.")
    if chosen.launch_bound:
        lines.append(
            "The host cannot issue operations as fast as the device runs them; a larger micro-batch or torch_compile "
            "helps."
        )
    if not chosen.calibrated:
        lines.append("Times come from data-sheet rates; `thrifty calibrate` on the device makes them exact.")
    return lines


def infeasible(search: Search, allow: Sequence[str]) -> list[str]:
    """What was tried, the least that would fit, and what would make it fit."""
    device = search.evaluator.device
    total = search.total()
    least = int(total.argmin())
    margin = 1 - search.limit() / device.memory_bytes
    needed = total[least] / (1 - margin)
    values = search.table[least]
    one = search.compiled[int(values["structure"])]
    assert isinstance(one, Compiled)
    states = one.bytes
    weights = states["parameters"] / (search.evaluator.devices if SHARDINGS[int(values["sharding"])] == "zero3" else 1)
    lines = [
        f"Nothing fits into {_size(device.memory_bytes)}: the smallest of {len(total)} configurations "
        f"({_describe(search, least)}) needs {_size(needed)} with a margin of {margin:.0%}."
    ]
    if weights + device.context_bytes > search.limit():
        lines.append(f"The weights alone take {_size(weights)}, so no micro-batch can help.")
    lines += _remedies(search, least, allow)
    return lines


def _remedies(search: Search, least: int, allow: Sequence[str]) -> list[str]:
    """Choices that were not allowed and would make the smallest configuration fit, and more devices."""
    evaluator = search.evaluator
    workload, device = evaluator.workload, evaluator.device
    division = [(int(search.table["micro_batch"][least]), int(search.table["accumulation"][least]))]
    base = search.structures[int(search.table["structure"][least])].recipe
    lines, found = [], []
    tried = {repr(s.recipe.to_config()) for s in search.structures}
    names = {method.name for method in base}
    one = search.compiled[int(search.table["structure"][least])]
    assert isinstance(one, Compiled)
    # Below an eighth of the weights not even four bits for each would fit: no choice is worth a dry run.
    hopeless = search.limit() < one.bytes["parameters"] / _LEAST_WEIGHTS
    recipes = [] if hopeless else single_additions(workload.with_methods(list(base)), device.kind)
    ends = time.monotonic() + _REMEDY_SECONDS
    for recipe in sorted(recipes, key=lambda r: not all(method.spec.exact for method in r)):
        if repr(recipe.to_config()) in tried:
            continue
        if time.monotonic() > ends:
            break
        added = next(method for method in recipe if method.name not in names)
        try:
            table = evaluator.table([Structure(workload, recipe, device).compile()], division)
        except InputError:
            continue  # It cannot be used here, so it is no remedy.
        needed = float(table["allocated"].min()) + device.context_bytes
        found.append((needed, added.name, added.settings()))
        if needed <= search.limit():
            break
    found.sort(key=lambda item: item[0])
    for needed, name, settings in found:
        if needed <= search.limit():
            shown = name + (":" + ",".join(f"{k}={v}" for k, v in settings.items()) if settings else "")
            lines.append(f"Allowing {shown} would bring it to {_size(needed)}, which fits (--allow {name}).")
            break
    more = _more_devices(search, least)
    if more:
        lines.append(more)
    if not lines:
        if found and found[0][0] < float(search.total()[least]):
            lines.append(
                f"The best single choice not yet allowed is {found[0][1]}, with {_size(found[0][0])}: still too much."
            )
        lines.append("A device with more memory, a shorter sequence or a smaller model is needed.")
    return lines


def _more_devices(search: Search, least: int) -> str:
    """The fewest devices on which dividing all states makes it fit."""
    one = search.compiled[int(search.table["structure"][least])]
    assert isinstance(one, Compiled)
    old = search.evaluator
    batch = np.array([1])
    for devices in (2, 4, 8, 16, 32, 64):
        if devices <= old.devices:
            continue
        evaluator = Evaluator(old.workload, old.device, devices)
        scales = evaluator.scales(one, "zero3")
        moments = one.moments(batch, old.workload.seq_len, later=True)
        needed = (
            float((moments @ scales.factors).max())
            + scales.extra
            + old.device.workspace_bytes
            + old.device.context_bytes
        )
        if needed <= search.limit():
            return f"{devices} devices with fully sharded states would need {_size(needed)} each, which fits."
    return ""


def _headline(chosen: Estimate) -> str:
    methods = ", ".join(_method(m) for m in chosen.methods) or "no methods"
    parts = f"micro-batch {chosen.micro_batch} x {chosen.accumulation} accumulation"
    if chosen.devices > 1:
        parts += f" x {chosen.devices} devices ({chosen.sharding})"
    return (
        f"Chosen: {parts}, {methods}: {_size(chosen.device_total_bytes)} of {_size(chosen.memory_limit_bytes)}, "
        f"{chosen.step_seconds:.3g} s a step, {chosen.tokens_per_second:,.0f} tokens/s."
    )


def _peak(chosen: Estimate) -> str:
    parts = sorted(chosen.breakdown.items(), key=lambda item: -item[1])
    shown = ", ".join(
        f"{_CATEGORY_WORDS[name]} {_size(value)}"
        for name, value in parts
        if value > 0.005 * chosen.peak_allocated_bytes
    )
    return f"The peak of {_size(chosen.peak_allocated_bytes)} is at {chosen.peak_phase}: {shown}."


def _bought(search: Search, row: int) -> list[str]:
    """What each choice changes against the same configuration without it."""
    values = search.table[row]
    structure = search.structures[int(values["structure"])]
    own = {method.name for method in search.structures[0].recipe}
    lines = []
    by_config = {repr(s.recipe.to_config()): i for i, s in enumerate(search.structures)}
    for method in structure.recipe:
        if method.name in own:
            continue
        others = [
            entry for entry, m in zip(structure.recipe.to_config(), structure.recipe, strict=True) if m is not method
        ]
        index = by_config.get(repr(others))
        if index is None:
            continue
        same = _same(search, row, structure=index)
        if same is None:
            continue
        lines.append(f"{method.name} {_difference(search, same, row)}.")
    larger = _row(search, int(values["structure"]), int(values["sharding"]), above=int(values["micro_batch"]))
    if larger is not None:
        lines.append(_larger(search, row, larger))
    return lines


def _larger(search: Search, row: int, larger: int) -> str:
    """Why not the next larger micro-batch."""
    needed, seconds = float(search.total()[larger]), float(search.table["seconds"][larger])
    verdict = "it does not fit" if needed > search.limit() else "it is not faster"
    if needed <= search.limit() and seconds < search.table["seconds"][row]:
        found = search.estimate(larger)
        needed = found.device_total_bytes
        verdict = "it gains less than a thousandth" if found.fits else "with fragmentation it does not fit"
    size = int(search.table["micro_batch"][larger])
    return f"The next larger micro-batch, {size}, would need {_size(needed)} and {seconds:.3g} s a step: {verdict}."


def _next_best(search: Search, row: int) -> list[str]:
    """The fastest fitting configuration of another class or sharding."""
    chosen = search.table[row]
    for other in search.order().tolist():
        values = search.table[other]
        differs = values["structure"] != chosen["structure"] or values["sharding"] != chosen["sharding"]
        if differs and float(search.total()[other]) <= search.limit():
            slower = values["seconds"] / chosen["seconds"] - 1
            if slower < -0.001:
                continue  # Faster, but fragmentation ruled it out.
            needed = _size(float(search.total()[other]))
            return [f"Next best: {_describe(search, other)} with {needed}, {slower:.1%} slower."]
    return []


def _same(search: Search, row: int, structure: int) -> int | None:
    values, table = search.table[row], search.table
    equal = (
        (table["structure"] == structure)
        & (table["micro_batch"] == values["micro_batch"])
        & (table["sharding"] == values["sharding"])
    )
    found = np.flatnonzero(equal)
    return int(found[0]) if len(found) else None


def _row(search: Search, structure: int, sharding: int, above: int) -> int | None:
    table = search.table
    found = np.flatnonzero(
        (table["structure"] == structure) & (table["sharding"] == sharding) & (table["micro_batch"] > above)
    )
    return int(found[table["micro_batch"][found].argmin()]) if len(found) else None


def _difference(search: Search, before: int, after: int) -> str:
    memory = float(search.table["allocated"][after] - search.table["allocated"][before])
    seconds = float(search.table["seconds"][after] / search.table["seconds"][before] - 1)
    saved = f"saves {_size(-memory)}" if memory < 0 else f"takes {_size(memory)} more"
    cost = f"costs {seconds:.1%} of time" if seconds > 0 else f"is {-seconds:.1%} faster"
    if abs(seconds) < 0.0005:
        cost = "costs no time"
    return f"{saved} and {cost} at this micro-batch"


def _describe(search: Search, row: int) -> str:
    configuration = search.configuration(row)
    methods = ", ".join(_method(m) for m in configuration.methods) or "no methods"
    sharding = "" if configuration.sharding == "none" else f", {configuration.sharding}"
    return f"micro-batch {configuration.micro_batch} x {configuration.accumulation}{sharding}, {methods}"


def _method(entry: Any) -> str:
    if isinstance(entry, str):
        return entry
    name, settings = next(iter(entry.items()))
    return f"{name} ({', '.join(f'{k}={v}' for k, v in settings.items())})"


def _size(nbytes: float) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(nbytes) >= size:
            return f"{nbytes / size:.2f} {unit}" if unit == "GiB" else f"{nbytes / size:.0f} {unit}"
    return f"{nbytes:.0f} B"

"""Every configuration that keeps the mathematics, by brute force.

A configuration is a structural class, a division of the global batch into micro-batches, accumulation and devices, and
a way of dividing the states among the devices. Classes are dry-run; the rest is arithmetic on arrays.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from thrifty.errors import InputError, did_you_mean
from thrifty.method import Phase
from thrifty.planner.compiled import Compiled
from thrifty.planner.replay import ClosedForm
from thrifty.planner.residuals import Residuals, workload_key
from thrifty.planner.step import batch_builder
from thrifty.planner.structure import Structure
from thrifty.planner.time import BANDWIDTH_SHARE, TimeModel, mean_time
from thrifty.planner.trace import CATEGORIES

if TYPE_CHECKING:
    from thrifty.hardware.devices import Device
    from thrifty.method import Method
    from thrifty.planner.workload import Workload
    from thrifty.recipe import Recipe

SHARDINGS = ("none", "ddp", "zero1", "zero2", "zero3")
"""How the states of N devices are divided: not at all; optimizer; and gradients; and parameters (ZeRO 3, FSDP)."""

PARAMETERS, GRADIENTS, OPTIMIZER = (CATEGORIES.index(name) for name in ("parameters", "gradients", "optimizer"))
# Seconds until a small collective has gone round one machine: what a launch and the ring's hops cost.
_COLLECTIVE_SECONDS = 3e-5
_DDP_BUCKET_BYTES = 25 * 2**20
# Elements in the bucket in which DeepSpeed reduces gradients by default.
_REDUCE_BUCKET = 500_000_000

MOST_CLASSES = 64
"""Dry runs of a micro-batch in one search: what 64 take is about what somebody waits for."""

TABLE = np.dtype(
    [
        ("structure", "i4"),
        ("micro_batch", "i8"),
        ("accumulation", "i8"),
        ("sharding", "i1"),
        ("allocated", "f8"),
        ("seconds", "f8"),
    ]
)
"""One row a configuration: index of the class, index into `SHARDINGS`, peak bytes allocated, seconds of a step."""


@dataclass(frozen=True)
class Scales:
    """What dividing states does to the bytes of each category, and what it adds."""

    factors: np.ndarray
    """(categories,)"""
    extra: float
    """Bytes of buffers."""


def sharding_scales(sharding: str, devices: int, states: dict[str, int], itemsize: int) -> Scales:
    """Closed forms of Rajbhandari et al., "ZeRO", 2020, with the buffers that implementations hold.

    Args:
        sharding: One of `SHARDINGS`.
        devices: How many.
        states: Bytes of parameters, gradients, and what is gathered at a time.
        itemsize: Bytes of one gradient element.
    """
    factors = np.ones(len(CATEGORIES))
    extra = 0.0
    if sharding == "ddp":
        extra = float(states["gradients"])  # The flat buckets in which gradients are reduced.
    if sharding in ("zero1", "zero2", "zero3"):
        factors[OPTIMIZER] = 1 / devices
        extra = float(min(states["gradients"], _REDUCE_BUCKET * itemsize))
    if sharding in ("zero2", "zero3"):
        factors[GRADIENTS] = 1 / devices
    if sharding == "zero3":
        factors[PARAMETERS] = 1 / devices
        # The block at work and the next one, each with parameters, and the gradients of one.
        extra = float(min(3 * states["gathered"], 2 * states["parameters"]))
    return Scales(factors, extra)


def zero_state_bytes(parameters: float, devices: int, stage: int, optimizer_bytes: float = 12.0) -> float:
    """Bytes of model states a device in mixed precision: 2 for weights, 2 for gradients, K for the optimizer."""
    if stage not in (0, 1, 2, 3):
        raise InputError("ZeRO has the stages 0 to 3", key="stage", value=stage)
    n = float(devices)
    weights, gradients, states = (
        2 / (n if stage > 2 else 1),
        2 / (n if stage > 1 else 1),
        optimizer_bytes / (n if stage else 1),
    )
    return parameters * (weights + gradients + states)


def factorisations(global_batch: int, devices: int) -> list[tuple[int, int]]:
    """All (micro-batch, accumulation) whose product with the devices is the global batch, smallest micro-batch first.

    Raises:
        InputError: The devices do not divide the global batch.
    """
    if global_batch < 1 or devices < 1:
        raise InputError(
            "must be at least 1",
            key="global_batch" if global_batch < 1 else "devices",
            value=min(global_batch, devices),
        )
    if global_batch % devices:
        lower, upper = global_batch // devices * devices, -(-global_batch // devices) * devices
        fix = f"{lower} or {upper}" if lower else str(upper)
        raise InputError(f"cannot be divided among {devices} devices", key="global_batch", value=global_batch, fix=fix)
    share = global_batch // devices
    return [(micro, share // micro) for micro in range(1, share + 1) if share % micro == 0]


def alternatives(workload: Workload, allow: Sequence[str], device: str = "cuda") -> Iterator[Recipe]:
    """The recipes to try: the user's own, and with combinations of declared choices, those with few additions first.

    Choices that leave the mathematics unchanged are free; the others need to be allowed, by name or by section.

    Args:
        workload: The run, with the user's methods.
        allow: Names, sections, or `all`.
        device: Kind of device.

    Raises:
        InputError: Something allowed is neither a method with choices nor a section.
    """
    from thrifty.recipe import Recipe

    return _combinations(Recipe.parse(workload.methods), _choices(workload, allow, device))


def single_additions(workload: Workload, device: str = "cuda") -> list[Recipe]:
    """The user's recipe with each declared choice alone, allowed or not."""
    from thrifty.recipe import Recipe

    base = Recipe.parse(workload.methods)
    return list(_combinations(base, _choices(workload, ("all",), device), most_added=1))[1:]


def _choices(workload: Workload, allow: Sequence[str], device: str) -> list[list[Method]]:
    """For each method that may be added, its settings to try."""
    from thrifty.method import registry
    from thrifty.recipe import Recipe

    base = Recipe.parse(workload.methods)
    axes: list[list[Method]] = []
    known = {n: registry.get(n).spec for n in registry.names() if registry.get(n).spec.choices}
    sections = {spec.section for spec in known.values()}
    for word in allow:
        if word not in known and word not in sections and word != "all":
            names = sorted({*known, *sections, "all"})
            raise InputError(
                f"unknown choice{did_you_mean(word, names)}", key="allow", value=word, fix="one of " + ", ".join(names)
            )
    for name, spec in known.items():
        if name in base or (spec.tasks and workload.task not in spec.tasks):
            continue
        free = [*spec.choices.get("free", ()), *(spec.choices.get("accelerator", ()) if device != "cpu" else ())]
        settings: list[Any] = list(free) if spec.exact else []
        if "optimizer" in spec.claims:
            settings = [s for s in settings if _same_optimizer(workload, base, registry.get(name)(**s))]
        if {name, spec.section, "all"} & set(allow):
            settings += [s for s in (*free, *spec.choices.get("allow", ())) if s not in settings]
        if settings:
            axes.append([registry.get(name)(**s) for s in settings])
    return axes


def _same_optimizer(workload: Workload, base: Recipe, method: Method) -> bool:
    """Whether a method builds the optimizer that the run has anyway, in another form: the optimizer is the user's."""
    import torch

    from thrifty.hardware.devices import get_device
    from thrifty.recipe import Recipe

    if base.owner("optimizer") is not None:
        return False
    host = get_device("cpu")
    parameters = [torch.nn.Parameter(torch.zeros(2, 2))]
    recipes = (base, Recipe([*base, method]))
    own, other = (type(Structure(workload, r, host).build_optimizer(parameters)) for r in recipes)
    return own is other


def _combinations(base: Recipe, axes: Sequence[Sequence[Method]], most_added: int | None = None) -> Iterator[Recipe]:
    """The base, then with one addition, with two, ..."""
    from thrifty.recipe import Recipe

    for count in range(1 + (len(axes) if most_added is None else most_added)):
        for some in itertools.combinations(axes, count):
            for chosen in itertools.product(*some):
                try:
                    yield Recipe([*base, *chosen])
                except InputError:
                    continue  # The methods' own declarations rule the combination out.


class Evaluator:
    """Evaluates configurations of compiled classes on one device.

    Args:
        workload: The run.
        device: Profile.
        devices: How many of them.
    """

    def __init__(self, workload: Workload, device: Device, devices: int = 1) -> None:
        self.workload, self.device, self.devices = workload, device, devices
        self._residuals = Residuals(device.id)
        self._workload_key = workload_key(workload)
        self._times: dict[Any, tuple[Any, Any]] = {}
        self._bodies: dict[Any, tuple[Any, tuple[np.ndarray, np.ndarray]]] = {}
        self._updates: dict[int, tuple[Any, float]] = {}
        self._adding: dict[int, tuple[Any, float]] = {}

    @cached_property
    def sample_bytes(self) -> int:
        """Bytes of one sample's inputs."""
        batch = batch_builder(self.workload.config, self.workload.task)(1, self.workload.seq_len)
        return sum(tensor.nbytes for tensor in batch.values())

    def beside(self, compiled: Compiled, micro: Any, accumulation: Any) -> Any:
        """Bytes that exist beside one micro-batch: what methods hold, and the step's other inputs.

        The trainer fetches all micro-batches of a step before the first; on a CPU also the next step's first.
        """
        waiting = accumulation - 1 + (1 if self.device.kind == "cpu" else 0)
        return compiled.held + waiting * micro * self.sample_bytes

    def residuals(self, compiled: Compiled) -> tuple[float, float]:
        """Measured over predicted memory and seconds, from `--verify`; 1 where nothing was measured."""
        return self._residuals.of(self._workload_key, compiled.key)

    def shardings(self) -> list[str]:
        """Ways to divide the states."""
        return ["none"] if self.devices == 1 else list(SHARDINGS[1:])

    def table(self, compiled: Sequence[Compiled | InputError], divisions: Sequence[tuple[int, int]]) -> np.ndarray:
        """Evaluates every combination of classes, divisions of the batch and shardings; an array of `TABLE`.

        Raises:
            InputError: A method says how many micro-batches a step has, and the batch cannot be divided so.
        """
        parts = []
        for index, one in enumerate(compiled):
            if not isinstance(one, Compiled):
                continue
            some = [(m, a) for m, a in divisions if one.accumulation in (None, a)]
            if not some and index:
                continue  # Only the user's own methods may rule the batch out.
            if not some:
                batch = self.devices * divisions[0][0] * divisions[0][1]
                raise InputError(
                    f"cannot be divided into the {one.accumulation} micro-batches that the methods ask for",
                    key="global_batch", value=batch, fix=f"a multiple of {one.accumulation}, or leave it to the plan",
                )  # fmt: skip
            parts.append(self._of_class(index, one, some))
        return np.concatenate(parts) if parts else np.zeros(0, TABLE)

    def _of_class(self, index: int, compiled: Compiled, divisions: Sequence[tuple[int, int]]) -> np.ndarray:
        parts = []
        shardings = self.shardings()
        memory, slower = self.residuals(compiled)
        for one in (True, False):
            some = [(m, a) for m, a in divisions if (m == 1) == one]
            if not some:
                continue
            all_micro, all_accumulation = (np.array(column) for column in zip(*some, strict=True))
            all_times = self.times(compiled, all_micro)
            for later in (True, False):
                at = np.flatnonzero((all_accumulation > 1) == later)
                if not len(at):
                    continue
                micro, accumulation, times = all_micro[at], all_accumulation[at], all_times.at(at)
                moments = self._moments(compiled, micro, later)
                for sharding in shardings:
                    rows = np.zeros(len(at), TABLE)
                    rows["structure"], rows["sharding"] = index, SHARDINGS.index(sharding)
                    rows["micro_batch"], rows["accumulation"] = micro, accumulation
                    scales = self.scales(compiled, sharding)
                    rows["allocated"] = (moments @ scales.factors).max(-1) + scales.extra + self.device.workspace_bytes
                    rows["allocated"] = memory * (rows["allocated"] + self.beside(compiled, micro, accumulation))
                    rows["seconds"] = slower * self.step_seconds(compiled, times, accumulation, sharding)
                    parts.append(rows)
        return np.concatenate(parts)

    def scales(self, compiled: Compiled, sharding: str) -> Scales:
        """What a sharding does to this class."""
        itemsize = 4 if self.workload.dtype == "float32" else 2
        return sharding_scales(sharding, self.devices, compiled.bytes, itemsize)

    def times(self, compiled: Compiled, micro: np.ndarray) -> Any:
        """`StepTime` of one micro-batch for each size: the mean over the run where it changes.

        Classes that differ in the optimizer only share it.
        """
        key = (id(compiled.step), compiled.precision, compiled.fused, repr(compiled.phases), tuple(micro.tolist()))
        if key not in self._times:
            # The step is kept, so that no other one takes its identity.
            self._times[key] = compiled.step, self._timed(compiled, micro)
        return self._times[key][1]

    def _moments(self, compiled: Compiled, micro: np.ndarray, later: bool) -> np.ndarray:
        """As `Compiled.moments`, with the share of the pass taken from classes that differ in the optimizer only."""
        key = (id(compiled.step), later, tuple(micro.tolist()))
        if key not in self._bodies:
            self._bodies[key] = compiled.step, compiled.pass_moments(micro, self.workload.seq_len, later=later)
        return compiled.with_update(*self._bodies[key][1])

    def _timed(self, compiled: Compiled, micro: np.ndarray) -> Any:
        model = TimeModel(self.device, tf32=compiled.precision == "tf32", causal=self.workload.causal)
        seq, parts = self.workload.seq_len, []
        for phase in compiled.phases or (Phase(steps=1, description="all"),):
            length = max(1, round(seq * phase.length)) if compiled.step.fixed_seq is None else seq
            ops = compiled.ops(micro, length, phase.depth)
            parts.append((phase.steps, model.step(ops, fused=compiled.fused).scaled(phase.batch)))
        return mean_time(parts)

    def step_seconds(self, compiled: Compiled, times: Any, accumulation: np.ndarray, sharding: str) -> np.ndarray:
        """Seconds of whole optimizer steps: micro-batches, update, and what communication adds."""
        states, n = compiled.bytes, self.devices
        share = 1 if sharding in ("none", "ddp") else n
        update = self._update_seconds(compiled) / share
        compute = accumulation * (times.seconds + TimeModel(self.device).micro_batch)
        compute = compute + (accumulation - 1) * self._adding_seconds(compiled)
        if n == 1:
            return compute + update
        ring = (n - 1) / n / self.device.link_bandwidth
        if sharding == "zero3":
            # Parameters are gathered for each pass and gradients scattered, at every micro-batch, behind the
            # computation.
            traffic = ring * (2 * states["parameters"] + states["gradients"])
            waits = 3 * sum(compiled.step.layers.values()) * _COLLECTIVE_SECONDS
            return np.maximum(compute, accumulation * traffic) + accumulation * waits + update
        # Gradients are reduced once a step behind its last backward pass; a divided optimizer sends the weights back.
        reduce = 2 * ring * states["gradients"]
        waits = -(-states["gradients"] // _DDP_BUCKET_BYTES) * _COLLECTIVE_SECONDS
        return compute + np.maximum(0.0, reduce - times.backward_seconds) + waits + update

    def _adding_seconds(self, compiled: Compiled) -> float:
        """Seconds that each micro-batch after the first takes longer, as it adds to gradients."""
        key = id(compiled.step)
        if key not in self._adding:
            ops = compiled.adding_ops
            seconds = float(TimeModel(self.device).step(ops).seconds[0]) if len(ops) else 0.0
            self._adding[key] = compiled.step, seconds
        return self._adding[key][1]

    def _update_seconds(self, compiled: Compiled) -> float:
        ops = compiled.update_ops
        if ops is not None and len(ops):
            key = id(compiled.optimizer)
            if key not in self._updates:
                self._updates[key] = compiled.optimizer, float(TimeModel(self.device).step(ops).seconds[0])
            return self._updates[key][1]
        if isinstance(compiled.optimizer, ClosedForm):
            states = compiled.bytes
            # Reads weights, gradients and states, and writes weights and states.
            moved = 3 * states["gradients"] + 2 * states["optimizer"]
            return moved / (self.device.bandwidth * BANDWIDTH_SHARE)
        return 0.0


def pareto(memory: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """Indices of the configurations that no other beats in both, by ascending memory."""
    order = np.lexsort((seconds, memory))
    best = np.minimum.accumulate(seconds[order])
    first = np.append(True, best[1:] < best[:-1])
    return order[first]

"""`estimate`: what one configuration costs. `plan`: the fastest one that fits, and why."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from thrifty.errors import InputError, did_you_mean
from thrifty.hardware.devices import Device, get_device
from thrifty.planner import search as search_space
from thrifty.planner.classes import compile_all, distinct
from thrifty.planner.compiled import Compiled
from thrifty.planner.search import SHARDINGS, Evaluator, alternatives, factorisations, pareto
from thrifty.planner.structure import Structure
from thrifty.planner.time import short_name
from thrifty.planner.trace import CATEGORIES
from thrifty.planner.workload import Workload, make_workload, parse_bytes, workload_from_run

if TYPE_CHECKING:
    from thrifty.config import RunConfig
    from thrifty.recipe import Recipe

MARGIN = 0.03
"""Share of the memory limit that is left free: for what the dry run does not see, and for fragmentation."""
_MOST_CHECKED = 64


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """What one configuration costs on one device of a kind. Bytes and seconds."""

    model: str
    task: str
    device: str
    devices: int
    sharding: str
    methods: list[Any]
    dtype: str
    seq_len: int
    micro_batch: int
    accumulation: int
    global_batch: int
    peak_allocated_bytes: int
    """Highest sum of living tensors, as `torch.cuda.max_memory_allocated` counts."""
    peak_reserved_bytes: int
    """What the caching allocator takes for them, as `max_memory_reserved`; on a CPU the same as allocated."""
    device_total_bytes: int
    """With the driver's context: what `nvidia-smi` shows."""
    breakdown: dict[str, int]
    """The peak by category."""
    peak_phase: str
    """Where in the step the peak is."""
    memory_limit_bytes: int
    margin_bytes: int
    fits: bool
    """Whether the total and the margin are within the limit."""
    parameters: int
    trainable_parameters: int
    step_seconds: float
    tokens_per_second: float
    samples_per_second: float
    model_flops: float
    """Operations that the model needs for one step on all devices, without recomputation."""
    mfu: float
    """Share of the peak rate that they reach."""
    launch_bound: bool
    """Whether the host cannot issue operations as fast as the device runs them."""
    calibrated: bool
    """Whether the times come from measurements of this machine."""
    host_bytes: int = 0
    """Host memory that offloading methods need."""
    memory_residual: float = 1.0
    """Measured over predicted bytes of verified runs, already applied."""
    seconds_residual: float = 1.0
    """Measured over predicted seconds of verified runs, already applied."""
    total_steps: int | None = None
    """Of the whole run, where it is known how long that is."""
    total_hours: float | None = None
    """What they take."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data for `--json`."""
        return asdict(self)

    def _repr_html_(self) -> str:
        from thrifty.planner.html import estimate_fragment

        return estimate_fragment(self)


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """One row of the search."""

    methods: list[Any]
    micro_batch: int
    accumulation: int
    sharding: str
    device_total_bytes: int
    step_seconds: float

    def to_dict(self) -> dict[str, Any]:
        """Plain data for `--json`."""
        return asdict(self)


@dataclass(kw_only=True)
class Plan:
    """The outcome of a search."""

    chosen: Estimate | None
    """The fastest configuration that fits; None where nothing does."""
    pareto: list[Configuration]
    """Configurations that no other beats in both memory and time, the smallest first."""
    configurations: int
    """How many were evaluated."""
    seconds: float
    explanation: list[str]
    rejected: dict[str, str]
    """Choices that cannot be used here, and why."""
    workload: Workload = field(repr=False)
    device: Device = field(repr=False)
    devices: int = 1
    compiled: Compiled | None = field(default=None, repr=False)
    verified: list[dict[str, Any]] = field(default_factory=list)
    """What real steps of the choices took (`--verify`)."""
    search: Search | None = field(default=None, repr=False)
    """Everything that was evaluated."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data for `--json`."""
        return {
            "chosen": None if self.chosen is None else self.chosen.to_dict(),
            "pareto": [c.to_dict() for c in self.pareto],
            "configurations": self.configurations,
            "seconds": self.seconds,
            "explanation": self.explanation,
            "rejected": self.rejected,
            "verified": self.verified,
        }

    def run_keys(self) -> dict[str, Any]:
        """The keys of a run file that train as planned.

        Raises:
            InputError: Nothing fits.
        """
        chosen = self.require()
        keys = {
            "per_device_train_batch_size": chosen.micro_batch,
            "gradient_accumulation_steps": chosen.accumulation,
            "methods": list(chosen.methods),
        }
        if chosen.dtype != "float32":
            keys["dtype"] = chosen.dtype
        return keys

    def require(self) -> Estimate:
        """The chosen configuration.

        Raises:
            InputError: Nothing fits.
        """
        if self.chosen is None:
            raise InputError(" ".join(self.explanation), key="memory")
        return self.chosen

    def _repr_html_(self) -> str:
        from thrifty.planner.html import plan_fragment

        return plan_fragment(self)


def estimate(
    model: str | Path | Mapping[str, Any] | Workload | RunConfig | Any,
    *,
    device: str | Device,
    micro_batch: int = 1,
    accumulation: int | None = None,
    devices: int = 1,
    sharding: str | None = None,
    memory: str | int | None = None,
    **options: Any,
) -> Estimate:
    """Predicts memory and time of one configuration without the device.

    Args:
        model: A catalogue name, folder, config mapping, `transformers` configuration, run file or `Workload`.
        device: Name of a profile, path of a device YAML, or a profile.
        micro_batch: Samples a device computes at a time.
        accumulation: Micro-batches a step; None where a method says how many, else 1.
        devices: How many devices of the kind.
        sharding: One of `SHARDINGS`; default none on one device, else ddp.
        memory: Limit of one device, e.g. `24GiB`; default what the device has.
        **options: As for `make_workload`: task, seq_len, dtype, methods, padded, `TrainingArguments` fields.

    Raises:
        InputError: A name or value is wrong, or a method does not apply.
    """
    from thrifty.recipe import Recipe

    profile = as_device(device, memory)
    workload = as_workload(model, options).settled(profile)
    for key, value in (("micro_batch", micro_batch), ("accumulation", accumulation or 1), ("devices", devices)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise InputError("must be a whole number, at least 1", key=key, value=value)
    chosen = sharding or ("none" if devices == 1 else "ddp")
    if chosen not in SHARDINGS:
        raise InputError(
            f"unknown{did_you_mean(chosen, SHARDINGS)}",
            key="sharding",
            value=chosen,
            fix="one of " + ", ".join(SHARDINGS),
        )
    if (chosen == "none") != (devices == 1):
        raise InputError(
            f"does not go with {devices} device(s)",
            key="sharding",
            value=chosen,
            fix="ddp or a ZeRO stage from two devices on",
        )
    structure = Structure(workload, Recipe.parse(workload.methods), profile)
    evaluator = Evaluator(workload, profile, devices)
    compiled = structure.compile()
    if accumulation is not None and compiled.accumulation not in (None, accumulation):
        raise InputError(
            f"the methods ask for {compiled.accumulation}", key="accumulation", value=accumulation, fix="leave it out"
        )
    return estimate_of(evaluator, structure, compiled, micro_batch, accumulation or compiled.accumulation or 1, chosen)


def estimate_of(
    evaluator: Evaluator, structure: Structure, compiled: Compiled, micro_batch: int, accumulation: int, sharding: str
) -> Estimate:
    """The full estimate of one configuration of a compiled class."""
    workload, device = evaluator.workload, evaluator.device
    batch, later = np.array([micro_batch]), accumulation > 1
    moments = compiled.moments(batch, workload.seq_len, later=later)[0]
    scales = evaluator.scales(compiled, sharding)
    totals = moments @ scales.factors
    top = int(totals.argmax())
    breakdown = {name: round(float(v)) for name, v in zip(CATEGORIES, moments[top] * scales.factors, strict=True)}
    breakdown["other"] += round(scales.extra) + device.workspace_bytes
    breakdown["other"] += round(evaluator.beside(compiled, micro_batch, accumulation))
    memory, slower = evaluator.residuals(compiled)
    breakdown["other"] += round((memory - 1) * sum(breakdown.values()))
    allocated = sum(breakdown.values())
    reserved = reserved_bytes(compiled, workload, device, micro_batch, later, allocated, sharding)
    total = reserved + device.context_bytes
    times = evaluator.times(compiled, batch)
    seconds = slower * float(evaluator.step_seconds(compiled, times, np.array([accumulation]), sharding)[0])
    samples = micro_batch * accumulation * evaluator.devices
    flops = float(times.flops[0] - times.recomputed_flops[0]) * accumulation * evaluator.devices
    margin = round(MARGIN * device.memory_bytes)
    return Estimate(
        model=workload.name, task=workload.task, device=device.id, devices=evaluator.devices, sharding=sharding,
        methods=structure.recipe.to_config(), dtype=workload.dtype, seq_len=workload.seq_len, micro_batch=micro_batch,
        accumulation=accumulation, global_batch=samples, peak_allocated_bytes=allocated, peak_reserved_bytes=reserved,
        device_total_bytes=total, breakdown=breakdown, peak_phase=compiled.phase(top, micro_batch, later=later),
        memory_limit_bytes=device.memory_bytes, margin_bytes=margin, fits=total + margin <= device.memory_bytes,
        parameters=compiled.step.parameter_count(), trainable_parameters=compiled.step.parameter_count(trainable=True),
        step_seconds=seconds, tokens_per_second=samples * workload.seq_len / seconds,
        samples_per_second=samples / seconds,
        model_flops=flops, mfu=flops / (seconds * evaluator.devices * peak_rate(device, compiled.precision)),
        launch_bound=bool(times.launch_bound[0]) and device.kind != "cpu", calibrated=device.calibration is not None,
        host_bytes=host_bytes(compiled, micro_batch, workload.seq_len), memory_residual=memory, seconds_residual=slower,
    )  # fmt: skip


# AdamW on the host reads and writes 28 bytes a parameter and holds 12 of them: the weight and two moments.
_HELD_OF_MOVED = 12 / 28


def host_bytes(compiled: Compiled, micro_batch: int, seq: int) -> int:
    """What a micro-batch leaves on the host until its backward pass, and the states that live there."""
    ops = compiled.ops(np.array([micro_batch]), seq)[0]
    kept = sum(float(op["read"] * op["count"]) for op in ops if short_name(op["name"]) == "to_host")
    update = compiled.update_ops
    rows = [] if update is None or not len(update) else update
    states = sum(float(op["k"] * op["count"]) for op in rows if short_name(op["name"]) == "on_host")
    return round(kept + states * _HELD_OF_MOVED)


def peak_rate(device: Device, precision: str) -> float:
    """Operations per second: measured where the device was calibrated, else of the data sheet."""
    measured = (device.calibration or {}).get("peak_flops", {})
    return float(measured.get(precision) or device.peak(precision))


def reserved_bytes(
    compiled: Compiled, workload: Workload, device: Device, micro_batch: int, later: bool, allocated: int, sharding: str
) -> int:
    """What the caching allocator reserves: simulated on one device, in proportion where states are divided."""
    if device.kind == "cpu":
        return allocated
    usage = compiled.step.reserved(
        micro_batch, workload.seq_len, accumulation=2 if later else 1, optimizer=compiled.optimizer
    )
    if sharding in ("none", "ddp"):
        return usage.reserved + max(0, allocated - usage.allocated)
    # Dividing the states leaves the gaps between activations as they are.
    return allocated + max(0, usage.reserved - usage.allocated)


def plan(
    model: str | Path | Mapping[str, Any] | Workload | RunConfig | Any,
    *,
    device: str | Device,
    global_batch: int,
    devices: int = 1,
    memory: str | int | None = None,
    allow: Sequence[str] = (),
    processes: int = 2,
    **options: Any,
) -> Plan:
    """Finds the fastest configuration that fits, without the device.

    The global batch, the optimizer and the precision are the user's: only choices that leave the mathematics unchanged
    are tried, and those that `allow` names.

    Args:
        model: As for `estimate`.
        device: As for `estimate`.
        global_batch: Samples a step on all devices together.
        devices: How many devices.
        memory: Limit of one device.
        allow: Names or sections of methods, or `all`.
        processes: Cores for dry runs.
        **options: As for `make_workload`.

    Raises:
        InputError: A name or value is wrong, or the batch cannot be divided.
    """
    from thrifty.planner.explain import explain

    begun = time.perf_counter()
    profile = as_device(device, memory)
    workload = as_workload(model, options).settled(profile)
    divisions = factorisations(global_batch, devices)
    most = search_space.MOST_CLASSES
    structures, complete = distinct(workload, alternatives(workload, allow, profile.kind), profile, most)
    compiled = compile_all(structures, processes)
    rejected = _rejected([structure.recipe for structure in structures], compiled)
    if isinstance(compiled[0], InputError):
        raise compiled[0]
    evaluator = Evaluator(workload, profile, devices)
    table = evaluator.table(compiled, divisions)
    search = Search(evaluator, structures, compiled, table)
    chosen_row, chosen = search.choose()
    front = pareto(table["allocated"], table["seconds"])
    result = Plan(
        chosen=chosen, pareto=[search.configuration(i) for i in front], configurations=len(table), seconds=0.0,
        explanation=[], rejected=rejected, workload=workload, device=profile, devices=devices,
    )  # fmt: skip
    if chosen_row is not None:
        one = compiled[int(table["structure"][chosen_row])]
        assert isinstance(one, Compiled)
        result.compiled = one
    result.search = search
    result.explanation = explain(search, chosen_row, chosen, allow)
    if not complete:
        result.explanation.append(
            f"Only the {len(structures)} combinations of methods with the fewest additions were tried; name what you "
            "would have in --methods to search around it."
        )
    result.seconds = time.perf_counter() - begun
    return result


@dataclass
class Search:
    """Everything that was evaluated."""

    evaluator: Evaluator
    structures: list[Structure]
    compiled: list[Compiled | InputError]
    table: np.ndarray

    def total(self) -> np.ndarray:
        """Bytes on the device without fragmentation, for every row."""
        return self.table["allocated"] + self.evaluator.device.context_bytes

    def limit(self) -> float:
        """Bytes that may be used."""
        return self.evaluator.device.memory_bytes * (1 - MARGIN)

    def order(self) -> np.ndarray:
        """Rows by time; where times are the same to a thousandth, the one that needs less memory first."""
        coarse = np.round(np.log(self.table["seconds"]) * 1000)
        return np.lexsort((self.table["allocated"], coarse))

    def choose(self) -> tuple[int | None, Estimate | None]:
        """The fastest row that fits, with its fragmentation simulated."""
        order = self.order()
        fitting = order[self.total()[order] <= self.limit()].tolist()
        failed: dict[tuple[int, int], int] = {}
        checked = 0
        for row in fitting:
            values = self.table[row]
            kind, micro = (int(values["structure"]), int(values["sharding"])), int(values["micro_batch"])
            if micro >= failed.get(kind, micro + 1):
                continue  # A smaller micro-batch of the same class was ruled out by fragmentation.
            found = self.estimate(row)
            if found.fits:
                return row, found
            failed[kind] = micro
            checked += 1
            if checked == _MOST_CHECKED:
                break
        # Fragmentation ruled the fastest out: the smallest is the last resort.
        for row in sorted(fitting, key=lambda r: self.table["allocated"][r])[:1]:
            found = self.estimate(row)
            if found.fits:
                return row, found
        return None, None

    def estimate(self, row: int) -> Estimate:
        """The full estimate of a row."""
        values = self.table[row]
        index = int(values["structure"])
        one = self.compiled[index]
        assert isinstance(one, Compiled)
        sharding = SHARDINGS[int(values["sharding"])]
        return estimate_of(
            self.evaluator,
            self.structures[index],
            one,
            int(values["micro_batch"]),
            int(values["accumulation"]),
            sharding,
        )

    def configuration(self, row: int) -> Configuration:
        """A row as plain data."""
        values = self.table[row]
        return Configuration(
            methods=self.structures[int(values["structure"])].recipe.to_config(),
            micro_batch=int(values["micro_batch"]),
            accumulation=int(values["accumulation"]),
            sharding=SHARDINGS[int(values["sharding"])],
            device_total_bytes=round(float(self.total()[row])),
            step_seconds=float(values["seconds"]),
        )


def as_workload(model: Any, options: Mapping[str, Any]) -> Workload:
    """A workload from whatever the caller has."""
    if isinstance(model, Workload):
        if options:
            raise InputError("a Workload is complete", key=next(iter(options)), fix="set it in make_workload")
        return model
    if hasattr(model, "data") and hasattr(model, "arguments"):
        return workload_from_run(model)
    if isinstance(model, (str, Path)) and str(model).endswith((".yaml", ".yml")):
        from thrifty.config import load_config

        return workload_from_run(load_config(model, [f"{k}={v}" for k, v in options.items()]))
    return make_workload(model, **options)


def as_device(device: str | Device, memory: str | int | None) -> Device:
    """A profile, with another limit where one is given."""
    profile = get_device(device) if isinstance(device, str) else device
    return profile if memory is None else profile.with_memory(parse_bytes(memory))


def _rejected(recipes: Sequence[Recipe], compiled: Sequence[Compiled | InputError]) -> dict[str, str]:
    """For each reason the smallest recipe that it rules out."""
    shortest: dict[str, Recipe] = {}
    for recipe, found in zip(recipes, compiled, strict=True):
        if isinstance(found, InputError) and (str(found) not in shortest or len(recipe) < len(shortest[str(found)])):
            shortest[str(found)] = recipe
    return {", ".join(method.name for method in recipe): why for why, recipe in shortest.items()}

"""A plan that was tried: three real steps of its choice, compared, stored, and planned again with what they showed."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from thrifty.errors import InputError
from thrifty.planner.measure import measure
from thrifty.planner.residuals import Residual, Residuals, workload_key

if TYPE_CHECKING:
    from thrifty.hardware.devices import Device
    from thrifty.planner.plan import Estimate, Plan
    from thrifty.planner.workload import Workload

ROUNDS = 3
# What a configuration that ran out of memory needs at the least, against the limit.
_OVER = 1.02


def here(device: Device) -> str:
    """The torch device of a profile on this machine.

    Raises:
        InputError: The profile is not of a device in this machine.
    """
    import torch

    from thrifty.hardware.devices import detect_id

    if device.kind == "cpu":
        return "cpu"
    if torch.cuda.is_available() and detect_id(torch.cuda.get_device_name()) == device.id:
        return "cuda"
    raise InputError(
        "is not in this machine, so nothing can be verified on it", key="device", value=device.id, fix="leave --verify"
    )


def verified_plan(workload: Workload, *, device: Device, devices: int = 1, rounds: int = ROUNDS, **search: Any) -> Plan:
    """Plans, trains three steps of the choice, and plans again, until the choice is one that was measured.

    Args:
        workload: The run.
        device: Profile of a device in this machine.
        devices: Must be 1: several cannot be tried in one process.
        rounds: How often at most.
        **search: As for `plan`.

    Returns:
        The last plan; `verified` holds every measurement.

    Raises:
        InputError: The device is not here.
    """
    from thrifty.planner.plan import plan

    if devices != 1:
        raise InputError("one device is verified at a time", key="devices", value=devices, fix="--devices 1")
    torch_device = here(device)
    workload = workload.settled(device)
    measured: list[dict[str, Any]] = []
    tried: set[str] = set()
    for _ in range(rounds + 1):
        found = plan(workload, device=device, devices=devices, **search)
        found.verified = measured
        chosen = found.chosen
        if chosen is None or _name(chosen) in tried or len(measured) == rounds:
            return found
        tried.add(_name(chosen))
        measured.append(_verify(workload, chosen, device, torch_device))
    return found


def _name(chosen: Estimate) -> str:
    return repr((chosen.methods, chosen.micro_batch, chosen.accumulation))


def _verify(workload: Workload, chosen: Estimate, device: Device, torch_device: str) -> dict[str, Any]:
    from thrifty.planner.structure import Structure
    from thrifty.recipe import Recipe

    run = replace(workload, methods=tuple(chosen.methods))
    took = measure(run, micro_batch=chosen.micro_batch, accumulation=chosen.accumulation, device=torch_device)
    # Ratios are against the bare prediction, whatever residual was applied to it.
    bytes_predicted = chosen.peak_allocated_bytes / chosen.memory_residual
    seconds_predicted = chosen.step_seconds / chosen.seconds_residual
    if took.peak_allocated_bytes is None or took.step_seconds is None:
        room = device.memory_bytes - device.context_bytes
        memory, seconds = max(_OVER * room / bytes_predicted, chosen.memory_residual * _OVER), chosen.seconds_residual
    else:
        memory = took.peak_allocated_bytes / bytes_predicted
        seconds = took.step_seconds / seconds_predicted
    Residuals(device.id).add(
        Residual(
            workload=workload_key(workload), structure=Structure(run, Recipe.parse(run.methods), device).key,
            micro_batch=chosen.micro_batch, accumulation=chosen.accumulation, memory=memory, seconds=seconds,
            date=datetime.now(UTC).isoformat(timespec="seconds"),
        )
    )  # fmt: skip
    return {
        "methods": chosen.methods,
        "micro_batch": chosen.micro_batch,
        "accumulation": chosen.accumulation,
        "out_of_memory": took.out_of_memory,
        "predicted_bytes": round(bytes_predicted),
        "measured_bytes": took.peak_allocated_bytes,
        "memory": memory,
        "predicted_seconds": seconds_predicted,
        "measured_seconds": took.step_seconds,
        "seconds": seconds,
    }

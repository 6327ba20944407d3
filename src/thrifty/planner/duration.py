"""How long a whole run takes: steps from samples and epochs, hours from the steps."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from thrifty.errors import InputError
from thrifty.planner.plan import Estimate, estimate
from thrifty.planner.workload import IMAGES_ALONE

if TYPE_CHECKING:
    from thrifty.hardware.devices import Device
    from thrifty.planner.workload import Workload

EPOCHS = 3.0
"""What `TrainingArguments.num_train_epochs` is by default."""


@dataclass(frozen=True, kw_only=True)
class Length:
    """How much is trained.

    Attributes:
        samples: In the data set; None where only the run file's `max_steps` says how long the run is.
        epochs: Passes over them; None takes the run file's `num_train_epochs`.
        mean_len: Mean tokens of a sample, where they are shorter than `seq_len`: memory is that of full samples, time
            that of mean ones.

    Raises:
        InputError: A number is too small, or epochs or a mean length have no samples to count.
    """

    samples: int | None = None
    epochs: float | None = None
    mean_len: int | None = None

    def __post_init__(self) -> None:
        for key, value in (("samples", self.samples), ("epochs", self.epochs), ("mean_len", self.mean_len)):
            if value is not None and not value > 0:
                raise InputError("must be above 0", key=key, value=value)
        if self.samples is None and self.epochs is not None:
            raise InputError("epochs of how many samples?", key="epochs", value=self.epochs, fix="--samples 52002")


def total_steps(workload: Workload, global_batch: int, length: Length) -> int | None:
    """Optimizer steps of the run as the Trainer counts them; None where nothing says how long it is."""
    most = workload.arguments.get("max_steps")
    if length.samples is None:
        return int(most) if most is not None and int(most) > 0 else None
    epochs = length.epochs
    if epochs is None:
        epochs = float(workload.arguments.get("num_train_epochs") or EPOCHS)
    return math.ceil(epochs * math.ceil(length.samples / global_batch))


def with_duration(found: Estimate, workload: Workload, device: Device, length: Length) -> Estimate:
    """The estimate with `total_steps` and `total_hours`, where it can be said how long the run is.

    Args:
        found: Of one configuration.
        workload: It was made of this one.
        device: The profile.
        length: How much is trained.

    Raises:
        InputError: The mean length is above that of a full sample, or the samples are images.
    """
    steps = total_steps(workload, found.global_batch, length)
    if steps is None:
        return found
    seconds = found.step_seconds
    if length.mean_len is not None and length.mean_len != workload.seq_len:
        if workload.task in IMAGES_ALONE:
            raise InputError("images all have the same size", key="mean_len", value=length.mean_len, fix="leave it out")
        if length.mean_len > workload.seq_len:
            raise InputError("is above seq_len", key="mean_len", value=length.mean_len, fix=f"<= {workload.seq_len}")
        shorter = replace(workload, seq_len=length.mean_len, methods=tuple(found.methods), auto_precision=False)
        seconds = estimate(
            shorter, device=device, micro_batch=found.micro_batch, accumulation=found.accumulation,
            devices=found.devices, sharding=found.sharding,
        ).step_seconds  # fmt: skip
    return replace(found, total_steps=steps, total_hours=steps * seconds / 3600)


def sentence(found: Estimate, length: Length) -> str:
    """The duration for people; empty where it is not known."""
    if found.total_hours is None or found.total_steps is None:
        return ""
    hours = found.total_hours
    shown = (
        f"{hours:.1f} hours" if hours >= 1 else f"{60 * hours:.0f} minutes" if hours > 0.05 else f"{3600 * hours:.0f} s"
    )
    of = "" if length.samples is None else f" for {length.samples:,} samples"
    mean = "" if length.mean_len is None else f" of {length.mean_len} tokens in the mean, padding not counted"
    return f"The run of {found.total_steps:,} steps{of}{mean} takes {shown} (estimated)."

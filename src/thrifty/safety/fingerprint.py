"""What a resumed run must agree on with the run that wrote the checkpoint, and where in the data it goes on.

The schedule and the data are described by small dictionaries that are stored in the manifest and compared on resume.
Position is counted in samples, so that another micro-batch, accumulation or process count goes on after the same
sample.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from thrifty.errors import InputError
from thrifty.safety.iterable import is_map_style

Schedule = Literal["continue", "extend"]
_SCHEDULE_KEYS = ("lr_scheduler_type", "lr_scheduler_kwargs", "learning_rate", "warmup_steps")
_LENGTH_KEYS = ("max_steps", "num_train_epochs")


@dataclass(frozen=True)
class Difference:
    """One thing that changed between the checkpoint and now."""

    part: Literal["schedule", "data", "batch"]
    key: str
    saved: Any
    now: Any

    def __str__(self) -> str:
        return f"{self.key} was {self.saved!r}, is {self.now!r}"


class Position(NamedTuple):
    """Where a resumed run goes on, in the terms of the new batch sizes."""

    epoch: int
    samples_into_epoch: int
    micro_batches_to_skip: int
    """Batches of this epoch that one process's data loader leaves out."""
    first_step_micro_batches: int
    """Micro-batches of the first step: fewer than `accumulation` where the position falls inside a step of the new
    size."""
    steps_into_epoch: int
    global_step: int
    """Whole optimizer steps that the new sizes would have needed so far."""
    max_steps: int
    """Optimizer steps of the whole run with the new sizes."""


def describe(
    args: Any, *, max_steps: int, total_batch_size: int, dataset: Any, sample_hash: bool = True
) -> dict[str, Any]:
    """Describes schedule, batch and data of a run. JSON-able.

    Args:
        args: `transformers.TrainingArguments`.
        max_steps: Optimizer steps of the whole run, resolved (never -1).
        total_batch_size: Samples an optimizer step, over micro-batch, accumulation and processes.
        dataset: The training set; one without length is described by its columns only.
        sample_hash: Whether to hash the first and last sample. Where reading twice gives two answers (augmentation)
            none is kept; the random state is left as it was.
    """
    schedule = {key: _plain(getattr(args, key, None)) for key in _SCHEDULE_KEYS}
    schedule |= {
        "max_steps": max_steps,
        "num_train_epochs": float(args.num_train_epochs) if args.max_steps <= 0 else None,
    }
    length = len(dataset) if hasattr(dataset, "__len__") else None
    ends = (0, length - 1) if length and sample_hash and is_map_style(dataset) else ()
    data = {
        "length": length,
        "columns": sorted(getattr(dataset, "column_names", None) or []),
        "first_and_last": [_stable_hash(dataset, i) for i in ends],
        "seed": args.data_seed if args.data_seed is not None else args.seed,
        "train_sampling_strategy": _plain(getattr(args, "train_sampling_strategy", None)),
        "dataloader_drop_last": args.dataloader_drop_last,
    }
    return {"schedule": schedule, "data": data, "batch": {"total_batch_size": total_batch_size}}


def compare(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[Difference]:
    """Returns what differs between two descriptions; nothing where `saved` is empty (a plain checkpoint has none)."""
    found: list[Difference] = []
    for part in ("schedule", "data", "batch"):
        old, new = saved.get(part, {}), now.get(part, {})
        for key in old:
            if old[key] != new.get(key):
                found.append(Difference(part, key, old[key], new.get(key)))
    # With another batch size the number of steps differs although the schedule, in epochs, is the same.
    if any(d.part == "batch" for d in found) and saved["schedule"]["num_train_epochs"] is not None:
        found = [d for d in found if d.key != "max_steps"]
    return found


def require_same(
    saved: Mapping[str, Any], now: Mapping[str, Any], schedule: Schedule | None = None
) -> list[Difference]:
    """Refuses a resume that would silently mean something else.

    Args:
        saved: The checkpoint's description.
        now: This run's description.
        schedule: The user's word for a changed schedule: `continue` keeps the saved learning-rate curve and ends where
            it ends (or holds its last value); `extend` lays the new curve over the whole run and goes on from the
            present step.

    Returns:
        The differences that were accepted: a changed batch, and a changed schedule where `schedule` says so.

    Raises:
        InputError: The data changed, or the schedule did and `schedule` is None.
    """
    found = compare(saved, now)
    if data := [d for d in found if d.part == "data"]:
        raise InputError(
            f"the data is not that of the checkpoint: {'; '.join(map(str, data))}",
            key="resume_from_checkpoint",
            fix="use the same data and seed, or start afresh from the checkpoint's weights (model_name_or_path)",
        )
    if (changed := [d for d in found if d.part == "schedule"]) and schedule is None:
        raise InputError(
            f"the schedule is not that of the checkpoint: {'; '.join(map(str, changed))}",
            key="schedule",
            fix="schedule=continue keeps the saved learning-rate curve, schedule=extend lays the new one over "
            "the whole run and goes on from the present step",
        )
    if schedule not in (None, "continue", "extend"):
        raise InputError("unknown meaning", key="schedule", value=schedule, fix="use continue or extend")
    return found


def resume_position(
    samples_seen: int,
    *,
    dataset_length: int,
    micro_batch: int,
    accumulation: int,
    world_size: int,
    num_train_epochs: float | None = None,
    max_steps: int | None = None,
    drop_last: bool = False,
) -> Position:
    """Says where to go on after `samples_seen` samples, with sizes that may differ from those of the checkpoint.

    Args:
        samples_seen: Samples consumed over all epochs (an epoch counts for `dataset_length`, or, with `drop_last`, for
            the samples it really yields).
        dataset_length: Samples an epoch.
        micro_batch: `per_device_train_batch_size`.
        accumulation: `gradient_accumulation_steps`.
        world_size: Processes.
        num_train_epochs: Length of the run in epochs; ignored where `max_steps` is given.
        max_steps: Length of the run in optimizer steps of the new total batch.
        drop_last: Whether an incomplete micro-batch at an epoch's end is left out.

    Raises:
        InputError: Nothing is left to run, or the position falls inside a micro-batch of the new size.
    """
    across = micro_batch * world_size
    total = across * accumulation
    per_epoch = dataset_length // across * across if drop_last else dataset_length
    if per_epoch == 0:
        raise InputError(
            f"an epoch of {dataset_length} samples holds no whole micro-batch of {across}",
            key="per_device_train_batch_size",
            value=micro_batch,
            fix="use a smaller micro-batch, or dataloader_drop_last=False",
        )
    epoch, into = divmod(samples_seen, per_epoch)
    if into % across:
        raise InputError(
            f"the checkpoint stopped {into} samples into an epoch, no multiple of the new {micro_batch} x {world_size}",
            key="per_device_train_batch_size",
            value=micro_batch,
            fix=f"choose micro-batch x processes so that it divides {into}, for instance {math.gcd(into, across)}",
        )
    steps_per_epoch = -(-per_epoch // total)
    steps_into = into // total
    step = epoch * steps_per_epoch + steps_into
    if max_steps is None:
        if num_train_epochs is None:
            raise ValueError("give num_train_epochs or max_steps")
        max_steps = math.ceil(num_train_epochs * steps_per_epoch)
        over = samples_seen >= num_train_epochs * per_epoch
    else:
        over = step >= max_steps
    if over:
        raise InputError(
            f"nothing is left to run: {samples_seen} samples (step {step} of {max_steps}) are already trained",
            key="max_steps" if num_train_epochs is None else "num_train_epochs",
            value=max_steps if num_train_epochs is None else num_train_epochs,
            fix="ask for more, with schedule=extend or schedule=continue, or evaluate the checkpoint",
        )
    skip = into // across
    return Position(epoch, into, skip, accumulation - skip % accumulation, steps_into, step, max_steps)


def samples_seen(
    global_step: int, *, dataset_length: int, total_batch_size: int, drop_last_to: int | None = None
) -> int:
    """Returns the samples that `global_step` steps consumed; the last step of an epoch may have been a smaller one.

    Args:
        global_step: Optimizer steps done.
        dataset_length: Samples an epoch.
        total_batch_size: Samples an optimizer step, with the sizes of that time.
        drop_last_to: Micro-batch x processes, where incomplete micro-batches were left out.
    """
    per_epoch = dataset_length // drop_last_to * drop_last_to if drop_last_to else dataset_length
    epochs, steps = divmod(global_step, -(-per_epoch // total_batch_size))
    return epochs * per_epoch + min(steps * total_batch_size, per_epoch)


def content_hash(sample: Any) -> str:
    """Returns a short hash of a sample: arrays and tensors by dtype, shape and bytes, containers by content."""
    digest = hashlib.blake2b(digest_size=8)
    _feed(digest, sample)
    return digest.hexdigest()


def _stable_hash(dataset: Any, index: int) -> str | None:
    from thrifty.safety.oom import rng_snapshot

    restore = rng_snapshot()
    first, second = content_hash(dataset[index]), content_hash(dataset[index])
    restore()
    return first if first == second else None


def _feed(digest: Any, value: Any) -> None:
    if isinstance(value, Mapping):
        for key in sorted(value, key=str):
            digest.update(f"<{key}>".encode())
            _feed(digest, value[key])
    elif isinstance(value, (list, tuple)):
        digest.update(f"[{len(value)}]".encode())
        for item in value:
            _feed(digest, item)
    elif hasattr(value, "tobytes") or hasattr(value, "numpy"):
        array = value.detach().cpu().numpy() if hasattr(value, "detach") else value
        digest.update(f"{getattr(array, 'dtype', '')}{getattr(array, 'shape', '')}".encode())
        digest.update(array.tobytes())
    else:
        text = repr(value)
        digest.update(f"{type(value).__name__}:{'' if ' at 0x' in text else text};".encode())


def _plain(value: Any) -> Any:
    """Returns enumerations and dictionaries as what JSON gives back."""
    value = getattr(value, "value", value)
    return json.loads(json.dumps(value, default=str, sort_keys=True))

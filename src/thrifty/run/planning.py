"""`plan: auto`: the division of the global batch and the free methods are chosen before the run, and said."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from thrifty.errors import InputError
from thrifty.run.console import say

if TYPE_CHECKING:
    from transformers import TrainingArguments

    from thrifty.config import RunConfig
    from thrifty.planner.plan import Plan

_DIVIDING = ("per_device_train_batch_size", "gradient_accumulation_steps")


def settle_batch(config: RunConfig, args: TrainingArguments) -> RunConfig:
    """Divides `global_batch_size`: as planned with `plan: auto`, else by accumulation alone.

    Returns:
        A configuration without `plan` and `global_batch_size`, so that the run file of the run repeats what was chosen.

    Raises:
        InputError: The batch cannot be divided, or nothing fits.
    """
    if config.plan is None:
        return _accumulate(config, args) if config.global_batch_size is not None else config
    found = _plan(config, args)
    for line in found.explanation:
        say("plan", line)
    keys = found.run_keys()
    arguments = {**config.arguments, **{key: keys[key] for key in _DIVIDING}}
    methods = keys["methods"]
    return dataclasses.replace(
        config, arguments=arguments, methods=methods, plan=None, plan_memory=None, plan_allow=[], global_batch_size=None
    )


def _plan(config: RunConfig, args: TrainingArguments) -> Plan:
    from thrifty.hardware.devices import detect_id
    from thrifty.planner.plan import plan
    from thrifty.planner.workload import workload_from_run

    if config.global_batch_size is None and not any(key in config.arguments for key in _DIVIDING):
        raise InputError("the global batch is yours to say", key="global_batch_size", fix="global_batch_size: 64")
    batch = config.global_batch_size or (
        args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
    )
    device = "cpu" if args.device.type == "cpu" else detect_id(_accelerator_name())
    found = plan(
        workload_from_run(config),
        device=device,
        devices=args.world_size,
        memory=config.plan_memory,
        global_batch=batch,
        allow=config.plan_allow,
    )
    found.require()
    return found


def _accelerator_name() -> str:
    import torch

    return torch.cuda.get_device_name()


def _accumulate(config: RunConfig, args: TrainingArguments) -> RunConfig:
    wanted: Any = config.global_batch_size
    if "gradient_accumulation_steps" in config.arguments:
        raise InputError(
            "global_batch_size decides the accumulation", key="gradient_accumulation_steps",
            value=config.arguments["gradient_accumulation_steps"], fix="give one of the two",
        )  # fmt: skip
    at_a_time = args.per_device_train_batch_size * args.world_size
    if wanted % at_a_time:
        raise InputError(
            f"is not a multiple of the {at_a_time} samples computed at a time", key="global_batch_size", value=wanted,
            fix=f"{max(1, wanted // at_a_time) * at_a_time}, or another per_device_train_batch_size",
        )  # fmt: skip
    arguments = {**config.arguments, "gradient_accumulation_steps": wanted // at_a_time}
    return dataclasses.replace(config, arguments=arguments, global_batch_size=None)

"""`thrifty estimate`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from thrifty.cli.arguments import Epochs, MeanLength, Samples

if TYPE_CHECKING:
    from thrifty.planner.workload import Workload


def estimate(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[CONFIG] [KEY=VALUE]...", help="A run file, and keys that override it."),
    ] = None,
    model: Annotated[str | None, typer.Option("--model", help="A known model, a folder or a config.json.")] = None,
    task: Annotated[str | None, typer.Option("--task", help="causal-lm, masked-lm, ...; default causal-lm.")] = None,
    device: Annotated[str, typer.Option("--device", help="One of `thrifty devices`, or a YAML file.")] = "cpu",
    micro_batch: Annotated[
        int | None, typer.Option("--micro-batch", help="Samples a device computes at a time.")
    ] = None,
    accumulation: Annotated[int | None, typer.Option("--accumulation", help="Micro-batches a step.")] = None,
    seq_len: Annotated[int | None, typer.Option("--seq-len", help="Tokens a sample.")] = None,
    methods: Annotated[str, typer.Option("--methods", help="E.g. 'bf16,lora:r=32,gradient-checkpointing'.")] = "",
    dtype: Annotated[str | None, typer.Option("--dtype", help="Of the weights: float32, bfloat16, float16.")] = None,
    padded: Annotated[bool, typer.Option("--padded", help="Batches hold padding.")] = False,
    devices: Annotated[int, typer.Option("--devices", help="How many devices.")] = 1,
    sharding: Annotated[str | None, typer.Option("--sharding", help="ddp, zero1, zero2 or zero3.")] = None,
    memory: Annotated[str | None, typer.Option("--memory", help="Limit of one device, e.g. 24GiB.")] = None,
    samples: Samples = None,
    epochs: Epochs = None,
    mean_len: MeanLength = None,
    config: Annotated[str | None, typer.Option("--config", help="A run file.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Predict memory and time of one configuration, without the device."""
    from thrifty.cli.arguments import quiet

    quiet()
    from thrifty.planner.duration import Length, sentence, with_duration
    from thrifty.planner.plan import as_device
    from thrifty.planner.plan import estimate as predict

    length = Length(samples=samples, epochs=epochs, mean_len=mean_len)
    workload, run = read_workload(arguments, config, model, task, seq_len, methods, dtype, padded)
    found = predict(
        workload, device=device, devices=devices, sharding=sharding, memory=memory,
        micro_batch=micro_batch if micro_batch is not None else run.get("per_device_train_batch_size", 1),
        accumulation=accumulation if accumulation is not None else run.get("gradient_accumulation_steps"),
    )  # fmt: skip
    found = with_duration(found, workload, as_device(device, memory), length)
    if json:
        from thrifty.report.files import to_json

        typer.echo(to_json(found.to_dict(), indent=2))
        return
    gib = 2**30
    typer.echo(
        f"{found.model}, micro-batch {found.micro_batch} x {found.accumulation}, {found.seq_len} tokens, {found.device}"
    )
    typer.echo(f"  allocated {found.peak_allocated_bytes / gib:.2f} GiB, "
               f"reserved {found.peak_reserved_bytes / gib:.2f} GiB, "
               f"on the device {found.device_total_bytes / gib:.2f} of {found.memory_limit_bytes / gib:.2f} GiB: "
               f"{'fits' if found.fits else 'does not fit'}")  # fmt: skip
    typer.echo(f"  peak at {found.peak_phase}: " + ", ".join(f"{k} {v / gib:.2f}" for k, v in found.breakdown.items()))
    typer.echo(f"  {found.step_seconds:.3g} s a step, {found.tokens_per_second:,.0f} tokens/s, MFU {found.mfu:.0%}")
    if found.total_hours is not None:
        typer.echo("  " + sentence(found, length))


def read_workload(
    arguments: list[str] | None,
    config: str | None,
    model: str | None,
    task: str | None,
    seq_len: int | None,
    methods: str,
    dtype: str | None,
    padded: bool,
) -> tuple[Workload, dict[str, Any]]:
    """The workload that the options name, and the training arguments of the run file where there is one.

    Raises:
        InputError: Neither a run file nor a model is given, or both.
    """
    from thrifty.cli.arguments import split_arguments
    from thrifty.errors import InputError
    from thrifty.planner.workload import make_workload, parse_methods, workload_from_run

    path, overrides = split_arguments(arguments or [])
    path = path or config
    if path is None and overrides == [] and model is None:
        raise InputError("nothing to look at", key="model", fix="give a run file, or --model gpt2 --seq-len 1024")
    if path is not None and model is not None:
        raise InputError("a run file and --model exclude each other", key="model", value=model, fix="keep one")
    if model is not None:
        options = {key: value for key, value in {"seq_len": seq_len, "dtype": dtype}.items() if value is not None}
        extra = _training_arguments(overrides)
        return make_workload(
            model, task=task or "causal-lm", methods=parse_methods(methods), padded=padded, **options, **extra
        ), extra
    from thrifty.config import load_config

    words = list(overrides)
    words += [
        f"{key}={value}"
        for key, value in (("task", task), ("max_length", seq_len), ("dtype", dtype))
        if value is not None
    ]
    run = load_config(path, words)
    if methods:
        run.methods = [*run.methods, *parse_methods(methods)]
    return workload_from_run(run), dict(run.arguments)


def _training_arguments(overrides: list[str]) -> dict[str, Any]:
    """`key=value` beside --model: fields of `TrainingArguments`."""
    import dataclasses

    import yaml
    from transformers import TrainingArguments

    from thrifty.errors import InputError, did_you_mean

    known = {f.name for f in dataclasses.fields(TrainingArguments)}
    values = {}
    for word in overrides:
        key, _, value = word.partition("=")
        if key not in known:
            raise InputError(f"no such training argument{did_you_mean(key, known)}", key=key, value=value)
        values[key] = yaml.safe_load(value)
    return values

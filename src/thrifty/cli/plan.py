"""`thrifty plan`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from thrifty.cli.arguments import Epochs, MeanLength, Samples

if TYPE_CHECKING:
    from thrifty.planner.plan import Plan
    from thrifty.planner.workload import Workload

_SETTLED = ("precision", "plan", "plan_memory", "plan_allow", "global_batch_size")
WRONG_INPUT = 2
"""What is asked for cannot be done: nothing fits."""


def plan(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[CONFIG] [KEY=VALUE]...", help="A run file, and keys that override it."),
    ] = None,
    model: Annotated[str | None, typer.Option("--model", help="A known model, a folder or a config.json.")] = None,
    task: Annotated[str | None, typer.Option("--task", help="causal-lm, masked-lm, ...; default causal-lm.")] = None,
    device: Annotated[str, typer.Option("--device", help="One of `thrifty devices`, or a YAML file.")] = "cpu",
    devices: Annotated[int, typer.Option("--devices", help="How many devices.")] = 1,
    memory: Annotated[str | None, typer.Option("--memory", help="Limit of one device, e.g. 24GiB.")] = None,
    global_batch: Annotated[int | None, typer.Option("--global-batch", help="Samples a step on all devices.")] = None,
    seq_len: Annotated[int | None, typer.Option("--seq-len", help="Tokens a sample.")] = None,
    methods: Annotated[str, typer.Option("--methods", help="Methods that are decided already.")] = "",
    dtype: Annotated[str | None, typer.Option("--dtype", help="Of the weights: float32, bfloat16, float16.")] = None,
    padded: Annotated[bool, typer.Option("--padded", help="Batches hold padding.")] = False,
    allow: Annotated[str, typer.Option("--allow", help="Methods or sections that may change the mathematics.")] = "",
    samples: Samples = None,
    epochs: Epochs = None,
    mean_len: MeanLength = None,
    export: Annotated[str | None, typer.Option("--export", help="Write the plan for another tool.")] = None,
    output: Annotated[str, typer.Option("--output", help="The folder for --export.")] = ".",
    write: Annotated[str | None, typer.Option("--write", help="Write a run file to train with.")] = None,
    html: Annotated[str | None, typer.Option("--html", help="Write a page with the memory timeline.")] = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Train three real steps of the choice here, and plan again with them.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Find the fastest configuration that fits, without the device, and say why."""
    from thrifty.cli.arguments import quiet

    quiet()
    from thrifty.cli.estimate import read_workload
    from thrifty.errors import InputError
    from thrifty.planner import export as tools
    from thrifty.planner.duration import Length, sentence, with_duration
    from thrifty.planner.plan import as_device
    from thrifty.planner.plan import plan as search
    from thrifty.planner.residuals import describe
    from thrifty.report.files import to_json

    if export is not None and export not in tools.TOOLS:
        from thrifty.errors import did_you_mean

        raise InputError(
            f"unknown tool{did_you_mean(export, tools.TOOLS)}", key="export", value=export, fix=", ".join(tools.TOOLS)
        )
    length = Length(samples=samples, epochs=epochs, mean_len=mean_len)
    workload, run = read_workload(
        arguments, model=model, config=None, task=task, seq_len=seq_len, methods=methods, dtype=dtype, padded=padded
    )
    batch = global_batch
    if batch is None:
        if "per_device_train_batch_size" not in run:
            raise InputError("the global batch is yours to say", key="global_batch", fix="--global-batch 64")
        batch = int(run["per_device_train_batch_size"]) * int(run.get("gradient_accumulation_steps", 1)) * devices
    allowed = [word.strip() for word in allow.split(",") if word.strip()]
    options: dict[str, Any] = {"devices": devices, "global_batch": batch, "allow": allowed}
    if verify:
        from thrifty.planner.verify import verified_plan

        found = verified_plan(workload, device=as_device(device, memory), **options)
    else:
        found = search(workload, device=device, memory=memory, **options)
    if found.chosen is not None:
        found.chosen = with_duration(found.chosen, found.workload, found.device, length)
        found.explanation += [line for line in (sentence(found.chosen, length),) if line]
    for path in (write, html):
        if path is not None and found.chosen is not None:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
    if html is not None:
        from thrifty.planner.html import write_html

        write_html(found, html)
    exported = tools.export_plan(found, export) if export is not None else None
    if exported is not None:
        exported.write(output)
    if write is not None:
        Path(write).write_text(run_file(found, workload, arguments), encoding="utf-8")
    if json:
        data = found.to_dict() | ({"export": exported.to_dict()} if exported is not None else {})
        typer.echo(to_json(data, indent=2))
        raise typer.Exit(0 if found.chosen is not None else WRONG_INPUT)
    typer.echo("\n".join(found.explanation))
    typer.echo(f"({found.configurations} configurations in {found.seconds:.1f} s)")
    for entry in found.verified:
        typer.echo(describe(entry))
    for name, why in found.rejected.items():
        typer.echo(f"not usable here: {name}: {why}")
    if exported is not None:
        typer.echo(
            f"{exported.tool}: {', '.join(exported.files)}"
            + (f"; flags: {' '.join(exported.flags)}" if exported.flags else "")
        )
        for line in exported.missing:
            typer.echo(f"  not expressed: {line}")
    if found.chosen is None:
        raise typer.Exit(WRONG_INPUT)


def run_file(found: Plan, workload: Workload, arguments: list[str] | None) -> str:
    """A run file that trains as planned: the user's own where there is one, with the planned keys in it."""
    import yaml

    from thrifty.cli.arguments import split_arguments

    path, overrides = split_arguments(arguments or [])
    if path is not None:
        from thrifty.config import load_config

        keys = load_config(path, overrides).to_dict()
    else:
        keys = {
            "model_name_or_path": workload.name,
            "task": workload.task,
            "max_length": workload.seq_len,
            **workload.arguments,
        }
    # What the plan has settled must not be settled again.
    left = {
        k: v
        for k, v in keys.items()
        if k not in ("precision", "plan", "plan_memory", "plan_allow", "global_batch_size")
    }
    return yaml.safe_dump({**left, **found.run_keys()}, sort_keys=False)

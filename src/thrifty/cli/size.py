"""`thrifty size`."""

from __future__ import annotations

from typing import Annotated

import typer


def size(
    flops: Annotated[float | None, typer.Option("--flops", help="The budget in operations, e.g. 1e19.")] = None,
    budget: Annotated[str | None, typer.Option("--budget", help="The budget as time, e.g. 2h; needs --device.")] = None,
    device: Annotated[str | None, typer.Option("--device", help="A device of `thrifty devices`.")] = None,
    devices: Annotated[int, typer.Option("--devices", help="How many of them.")] = 1,
    precision: Annotated[str | None, typer.Option("--precision", help="fp32, tf32, fp16, bf16.")] = None,
    utilisation: Annotated[
        float | None, typer.Option("--mfu", help="Share of the peak rate that training reaches.")
    ] = None,
    approach: Annotated[str, typer.Option("--approach", help="1, 2, 3 (Hoffmann et al. 2022) or refit (2024).")] = "1",
    vocab_size: Annotated[int, typer.Option("--vocab-size", help="For the suggested shape.")] = 32000,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """How large a model, on how many tokens, a compute budget is best spent (Chinchilla)."""
    from thrifty.errors import InputError
    from thrifty.planner import sizing

    if (flops is None) == (budget is None):
        raise InputError(
            "give either --flops or --budget",
            key="flops",
            value=flops,
            fix="--flops 1e19, or --budget 2h --device a100",
        )
    if flops is not None:
        found = sizing.size_for_flops(flops, approach=approach, vocab_size=vocab_size)
    else:
        from thrifty.hardware.devices import get_device

        if device is None:
            raise InputError(
                "a time budget needs a device", key="device", fix="--device a100-80gb; `thrifty devices` lists them"
            )
        found = sizing.size_for_time(
            sizing.parse_duration(budget or ""), get_device(device), devices=devices, precision=precision,
            utilisation=utilisation, approach=approach, vocab_size=vocab_size,
        )  # fmt: skip
    if json:
        from thrifty.report.files import to_json

        typer.echo(to_json(found.to_dict(), indent=2))
        return
    typer.echo(f"{found.flops:.3g} operations: {found.parameters:.3g} parameters on {found.tokens:.3g} tokens")
    typer.echo(f"  approach {found.approach}: {sizing.APPROACHES[found.approach]}")
    others = ", ".join(f"{name} {value:.3g}" for name, value in found.alternatives.items())
    typer.echo(f"  parameters by the other approaches: {others}")
    shape = ", ".join(f"{key} {value}" for key, value in found.shape.items())
    typer.echo(f"  a Llama of that size: {shape}")
    for line in found.assumptions:
        typer.echo(f"  assuming {line}")

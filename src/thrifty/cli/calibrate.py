"""`thrifty calibrate`."""

from __future__ import annotations

from typing import Annotated

import typer


def calibrate(
    device: Annotated[str, typer.Option("--device", help="cpu or cuda; default cuda where there is one.")] = "auto",
    seconds: Annotated[float, typer.Option("--seconds", help="Roughly how long to measure.")] = 20.0,
    forget: Annotated[bool, typer.Option("--forget", help="Remove the stored measurement instead.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the measurement as JSON.")] = False,
) -> None:
    """Measure how fast this machine is, in about 20 seconds, so that predicted times become exact."""
    from thrifty.errors import InputError
    from thrifty.hardware import calibrate as measuring

    if seconds <= 0:
        raise InputError("must be positive", key="seconds", value=seconds)
    if device == "auto":
        import torch

        device = "cuda" if torch.cuda.is_available() else "cpu"
    if forget:
        existed = measuring.forget_calibration(device)
        typer.echo("removed" if existed else "there was none")
        return
    found = measuring.calibrate(device, seconds=seconds)
    if json:
        from thrifty.report.files import to_json

        typer.echo(to_json(found, indent=2))
        return
    typer.echo(f"{found['name']}, {found['threads']} threads, measured in {found['seconds']} s")
    for precision, rate in found["peak_flops"].items():
        typer.echo(f"  matrix products in {precision}: {rate / 1e9:,.0f} GFLOP/s")
    typer.echo(f"  one operation costs the framework {found['overhead_seconds'] * 1e6:.1f} us")
    if found["in_step"] != 1.0:
        typer.echo(f"  inside a step everything takes {found['in_step']:.2f} times as long as alone")

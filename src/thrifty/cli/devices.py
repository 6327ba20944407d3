"""`thrifty devices`."""

from __future__ import annotations

from typing import Annotated

import typer


def devices(
    name: Annotated[str | None, typer.Argument(help="Show one device with the sources of its numbers.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the built-in device profiles, or show one."""
    from thrifty.hardware.devices import get_device, list_devices
    from thrifty.report.files import to_json

    if name is not None:
        device = get_device(name)
        if json:
            typer.echo(to_json(device.to_dict(), indent=2))
            return
        rates = ", ".join(f"{k} {v / 1e12:.4g}" for k, v in device.peak_flops.items())
        lines = {
            "name": device.name,
            "aliases": ", ".join(device.aliases),
            "memory": f"{device.memory_bytes / 2**30:.2f} GiB usable of {device.nominal_bytes / 2**30:.0f}",
            "dense peak, TFLOP/s": rates,
            "memory bandwidth": f"{device.bandwidth / 1e9:.0f} GB/s",
            "link, host": f"{device.link_bandwidth / 1e9:.0f}, {device.host_bandwidth / 1e9:.1f} GB/s",
            "processors": str(device.processors),
            "attention": ", ".join(device.attention),
            "calibrated": "yes" if device.calibration else "no",
            "sources": "; ".join(device.sources),
        }
        typer.echo("\n".join(f"{key:<20} {value}" for key, value in lines.items()))
        return
    found = list_devices()
    if json:
        typer.echo(to_json([device.to_dict() for device in found], indent=2))
        return
    typer.echo(f"{'id':<12} {'GiB':>6} {'fp32':>7} {'bf16':>7} {'fp8':>7} {'GB/s':>6}  name")
    for device in found:
        rates = [
            f"{device.peak_flops[k] / 1e12:.4g}" if k in device.peak_flops else "-" for k in ("fp32", "bf16", "fp8")
        ]
        memory, speed = device.memory_bytes / 2**30, device.bandwidth / 1e9
        typer.echo(
            f"{device.id:<12} {memory:>6.1f} {rates[0]:>7} {rates[1]:>7} {rates[2]:>7} {speed:>6.0f}  {device.name}"
        )

"""`thrifty env`."""

from __future__ import annotations

from typing import Annotated

import typer


def env(json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Show versions and hardware, for a report of a fault."""
    from thrifty.cli.arguments import quiet

    quiet()
    import platform

    from thrifty.data.cache import cache_dir
    from thrifty.hardware.detect import detect
    from thrifty.report.files import to_json
    from thrifty.report.summary import versions

    optional = ("bitsandbytes", "torchao", "liger-kernel", "deepspeed", "flash-attn", "kernels")
    found = {**versions(), **{name: _version(name) for name in optional}}
    hardware = detect()
    if json:
        facts = {
            "versions": found,
            "platform": platform.platform(),
            "hardware": hardware.to_dict(),
            "cache": cache_dir(),
        }
        typer.echo(to_json(facts, indent=2))
        return
    width = max(map(len, found))
    for name, version in found.items():
        typer.echo(f"{name:<{width}}  {version or 'not installed'}")
    typer.echo(f"{'platform':<{width}}  {platform.platform()}")
    for line in hardware.lines():
        typer.echo(f"{'hardware':<{width}}  {line}")
    typer.echo(f"{'bf16':<{width}}  {'at full rate' if hardware.bf16 else 'emulated or slow here'}")
    typer.echo(f"{'cache':<{width}}  {cache_dir()}")


def _version(name: str) -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(name)
    except PackageNotFoundError:
        return None

"""`thrifty methods`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from thrifty.method import Method


def methods(
    name: Annotated[str | None, typer.Argument(help="Show one method: its card, settings and sources.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the techniques, or explain one."""
    from thrifty.cli.arguments import quiet

    quiet()
    from thrifty.method import registry
    from thrifty.report.files import to_json

    if name is not None:
        method = registry.get(name)
        typer.echo(to_json(as_dict(method), indent=2) if json else _explain(method))
        return
    found = [registry.get(known) for known in registry.names()]
    if json:
        typer.echo(to_json([as_dict(method) for method in found], indent=2))
        return
    width = max((len(method.spec.name) for method in found), default=0)
    section = None
    for method in found:
        if method.spec.section != section:
            section = method.spec.section
            typer.echo(f"\n{section.replace('_', ' ')}" if method is not found[0] else section.replace("_", " "))
        typer.echo(f"  {method.spec.name:<{width}}  {method.spec.title}")


def as_dict(method: type[Method]) -> dict[str, Any]:
    """What the method declares, and its settings with type, default and meaning."""
    return {**method.spec.to_dict(), "settings": settings_of(method)}


def settings_of(method: type[Method]) -> dict[str, dict[str, Any]]:
    """Type, default and meaning of each setting of a method."""
    import dataclasses
    import typing

    from thrifty.config.annotations import attribute_docs, describe

    docs, hints = attribute_docs(method), typing.get_type_hints(method)
    settings = {}
    for field in dataclasses.fields(method):
        if field.init:
            factory = field.default_factory
            default = field.default if factory is dataclasses.MISSING else factory()
            settings[field.name] = {
                "type": describe(hints[field.name]),
                "default": None if default is dataclasses.MISSING else default,
                "required": default is dataclasses.MISSING,
                "description": docs.get(field.name, ""),
            }
    return settings


def _explain(method: type[Method]) -> str:
    from thrifty.method import card_of

    spec = method.spec
    lines = [
        f"{spec.name}: {spec.title}",
        "",
        card_of(method).text,
        "",
        "Settings:" if settings_of(method) else "No settings.",
    ]
    for name, setting in settings_of(method).items():
        default = "required" if setting["required"] else f"default {setting['default']}"
        lines.append(f"  {name} ({setting['type']}; {default})\n      {setting['description']}")
    facts: list[tuple[str, Any]] = [
        ("section", spec.section.replace("_", " ")),
        ("sources", "; ".join(map(str, spec.sources))),
        ("leaves the mathematics of a step unchanged", "yes" if spec.exact else "no"),
        ("resumable", "yes" if spec.resumable else "no"),
        ("saves as", spec.saves_as.replace("_", " ")),
        ("fills the slot", ", ".join(spec.claims)),
        ("requires", ", ".join(spec.requires)),
        ("excludes", "; ".join(f"{other} ({why})" for other, why in spec.conflicts_with.items())),
        ("tasks", ", ".join(spec.tasks) or "all"),
        ("library", spec.library),
        ("extra", f"pip install 'thrifty[{spec.extra}]'" if spec.extra else None),
    ]
    return "\n".join([*lines, "", *(f"{label}: {value}" for label, value in facts if value)])

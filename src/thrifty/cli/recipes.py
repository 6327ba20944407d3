"""`thrifty recipes`."""

from __future__ import annotations

from typing import Annotated, Literal

import typer


def recipes(
    action: Annotated[str, typer.Argument(metavar="[ls|show|copy]", help="What to do.")] = "ls",
    name: Annotated[str | None, typer.Argument(help="Of a recipe.")] = None,
    target: Annotated[str | None, typer.Argument(help="copy: a file or folder; default here.")] = None,
    json: Annotated[bool, typer.Option("--json", help="ls: print JSON.")] = False,
) -> None:
    """Run files to start from: list them, show one, or copy one to edit.

    Examples: `thrifty recipes`, `thrifty recipes show lora`, `thrifty recipes copy lora my.yaml`.
    """
    from thrifty import recipes as shelf
    from thrifty.errors import InputError, did_you_mean

    actions: tuple[Literal["ls", "show", "copy"], ...] = ("ls", "show", "copy")
    if action not in actions:
        raise InputError(
            f"no such action{did_you_mean(action, actions)}", key="action", value=action, fix="ls, show or copy"
        )
    if action == "ls":
        if name is not None:
            raise InputError("ls takes no name", key="name", value=name, fix=f"thrifty recipes show {name}")
        found = {one: shelf.about(one) for one in shelf.names()}
        if json:
            from thrifty.report.files import to_json

            typer.echo(to_json(found, indent=2))
            return
        width = max(map(len, found))
        typer.echo("\n".join(f"{one:<{width}}  {text}" for one, text in found.items()))
        return
    if name is None:
        raise InputError("which one?", key="name", fix=", ".join(shelf.names()))
    if action == "show":
        typer.echo(shelf.read(name), nl=False)
        return
    written = shelf.copy(name, target or ".")
    typer.echo(f"{written}: edit it, then `thrifty train {written}`")

"""`thrifty scores`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

ACTIONS = ("list", "show", "export")


def scores(
    action: Annotated[str, typer.Argument(help="list, show or export.")] = "list",
    name: Annotated[str | None, typer.Argument(help="A file, or a name that `list` shows (or its beginning).")] = None,
    output: Annotated[str | None, typer.Argument(help="export: a .csv, .jsonl or .parquet file.")] = None,
    count: Annotated[int, typer.Option("--count", "-n", help="show: samples at either end.", min=1)] = 5,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the scores that methods have given to training samples, show the highest and lowest, or export them.

    Another run uses them with the setting `scores: FILE` of the method.
    """
    from thrifty import scores as stored
    from thrifty.cli.arguments import quiet
    from thrifty.errors import InputError, did_you_mean

    quiet()
    if action not in ACTIONS:
        raise InputError(
            f"unknown action{did_you_mean(action, ACTIONS)}", key="action", value=action, fix=", ".join(ACTIONS)
        )
    if action == "list":
        _list(json)
        return
    if name is None:
        raise InputError("says not which scores", key="name", fix=f"thrifty scores {action} NAME")
    found = stored.load(stored.find(name), key="name")
    if action == "show":
        _show(found, count, json)
        return
    if output is None:
        raise InputError("says not where to", key="output", fix=f"thrifty scores export {name} scores.csv")
    from pathlib import Path

    target = Path(output).expanduser()
    if target.exists():
        raise InputError("the file is there already", key="output", value=output, fix="name another one")
    found.save(target)
    typer.echo(f"{len(found)} scores written to {target}")


def _list(json: bool) -> None:
    from thrifty import scores as stored
    from thrifty.report.files import to_json

    rows: list[dict[str, Any]] = []
    for file in stored.stored():
        found = stored.load(file)
        rows.append({"name": file.stem, "samples": len(found), **found.about, "file": str(file)})
    if json:
        typer.echo(to_json(rows, indent=2))
        return
    if not rows:
        typer.echo(f"no scores in {stored.folder()}: methods such as el2n leave them there")
    for row in rows:
        settings = ", ".join(f"{key}={value}" for key, value in (row.get("settings") or {}).items())
        typer.echo(f"{row['name']}  {row['samples']} samples  {row.get('model', '')}  {settings}")


def _show(found: Any, count: int, json: bool) -> None:
    from thrifty.report.files import to_json

    ends: dict[str, list[dict[str, Any]]] = {}
    for end, largest in (("highest", True), ("lowest", False)):
        rows = found.order(largest=largest)[:count]
        ends[end] = [
            {
                "sample_id": int(found.ids[i]),
                "score": float(found.values[i]),
                "text": found.texts[i] if found.texts else None,
            }
            for i in rows
        ]
    if json:
        typer.echo(to_json({"about": found.about, "samples": len(found), **ends}, indent=2))
        return
    for key, value in {"samples": len(found), **found.about}.items():
        typer.echo(f"{key:<10}  {value}")
    for end, rows in ends.items():
        typer.echo(f"\n{end}")
        for row in rows:
            text = " ".join((row["text"] or "").split())
            typer.echo(f"  {row['score']:>12.5g}  #{row['sample_id']:<8} {text[:160]}")

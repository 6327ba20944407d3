"""`thrifty compare`."""

from __future__ import annotations

from typing import Annotated

import typer


def compare(
    runs: Annotated[list[str], typer.Argument(metavar="RUN RUN...", help="Folders that `thrifty train` wrote.")],
    html: Annotated[str, typer.Option("--html", help="Where the page goes.")] = "compare.html",
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Set runs side by side: a table of results, cost and differing settings, and one page with their curves."""
    from thrifty.cli.arguments import quiet

    quiet()
    from pathlib import Path

    from thrifty.bench.compare import load, page, plain, table
    from thrifty.errors import InputError
    from thrifty.report.files import to_json, write_atomic

    loaded = load(runs)
    head, rows = table(loaded)
    if Path(html).is_dir() or (Path(html).parent.exists() and not Path(html).parent.is_dir()):
        raise InputError("is not a place for a file", key="--html", value=html, fix="the path of a file")
    Path(html).parent.mkdir(parents=True, exist_ok=True)
    write_atomic(html, page(loaded))
    if json:
        shown = [{"name": r["name"], "folder": r["folder"], "summary": r["summary"]} for r in loaded]
        typer.echo(to_json({"runs": shown, "table": [head, *rows]}, indent=2))
    else:
        typer.echo(plain(head, rows))
        typer.echo(f"page: {html}")

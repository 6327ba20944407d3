"""`thrifty evaluate`."""

from __future__ import annotations

from typing import Annotated

import typer


def evaluate(
    model: Annotated[str, typer.Argument(help="The folder of a run, or any model folder or hub id.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="For example validation_file=other.jsonl.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure the validation loss (and perplexity, bits per byte or accuracy) of a model. Writes nothing."""
    from thrifty.cli.arguments import quiet

    quiet()
    from thrifty.report.files import to_json
    from thrifty.run import evaluation

    metrics = evaluation.evaluate(model, overrides or [])
    if json:
        typer.echo(to_json(metrics, indent=2))
    else:
        typer.echo("\n".join(evaluation.metric_lines(metrics)))
